"""A real HTTP and WebSocket server that answers as Ray's job API does (2.58, dashboard/modules/job), and breaks off where a test says so."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "the-token"


class FakeRay:
    """One job. ``cuts``: how many characters each stream may send before its connection is cut; None: no cut. ``deaf``: connections that get no answer."""

    def __init__(self, log: str = "", state: str = "RUNNING", exit_code: int | None = None) -> None:
        self.log, self.state, self.exit_code, self.message = log, state, exit_code, ""
        self.cuts: list[int | None] = []
        self.hang_ups: list[str] = []  # paths' ends whose next request is cut off without an answer
        self.silent_streams = 0  # so many streams go on for ever, without another word
        self.at_stream_end: Callable[[FakeRay], None] = lambda _: None
        self.requests: list[str] = []
        self.stopped = False
        self.packages: dict[str, bytes] = {}
        self.submitted: dict[str, Any] = {}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def answer(self, value: Any, code: int = 200) -> None:
                body = json.dumps(value).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def begins(self) -> bool:
                fake.requests.append(f"{self.command} {self.path}")
                for end in fake.hang_ups:
                    if self.path.endswith(end):
                        fake.hang_ups.remove(end)
                        self.connection.shutdown(socket.SHUT_RDWR)
                        self.close_connection = True
                        return False
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    self.answer("no", 401)
                    return False
                return True

            def do_GET(self) -> None:
                if not self.begins():
                    return
                if self.path.endswith("/logs/tail"):
                    fake._stream(self)
                elif self.path.endswith("/logs"):
                    self.answer({"logs": fake.log})
                elif self.path.startswith("/api/packages/"):
                    self.answer({}, 200 if self.path in fake.packages else 404)
                elif self.path == "/api/jobs/lost":
                    self.answer("Job lost does not exist", 404)
                else:
                    said = {"submission_id": "job", "status": fake.state, "message": fake.message, "driver_exit_code": fake.exit_code, "start_time": 1000}
                    self.answer([said] if self.path == "/api/jobs/" else said)

            def do_PUT(self) -> None:
                if self.begins():
                    fake.packages[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
                    self.answer({})

            def do_POST(self) -> None:
                if not self.begins():
                    return
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.path.endswith("/stop"):
                    fake.stopped = True
                else:
                    fake.submitted = json.loads(body)
                self.answer({})

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """A cut connection is what these tests are about."""

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def connect(self) -> socket.socket:
        return socket.create_connection(self.server.server_address[:2], timeout=10)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _stream(self, handler: Any) -> None:
        key = handler.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        answer = f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n\r\n"
        handler.wfile.write(answer.encode())
        handler.close_connection = True
        cut = self.cuts.pop(0) if self.cuts else None
        text = self.log if cut is None else self.log[:cut]
        for start in range(0, len(text), 50):
            handler.wfile.write(_frame(text[start : start + 50].encode()))
        handler.wfile.flush()
        if self.silent_streams:
            self.silent_streams -= 1
            handler.connection.recv(1)  # until the other side gives up
        elif cut is None:
            handler.wfile.write(struct.pack("!BB", 0x88, 0))  # a close that says: all is well
            handler.wfile.flush()
        else:
            handler.connection.shutdown(socket.SHUT_RDWR)
        self.at_stream_end(self)


def _frame(data: bytes) -> bytes:
    assert len(data) < 65536
    head = struct.pack("!BB", 0x81, len(data)) if len(data) < 126 else struct.pack("!BBH", 0x81, 126, len(data))
    return head + data
