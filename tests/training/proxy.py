"""An S3 server that fails on purpose: moto's server, and a proxy before it that delays, refuses, cuts and counts requests."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SLOW_DOWN = (503, "SlowDown", "Please reduce your request rate.")
EXPIRED = (400, "ExpiredToken", "The provided token has expired.")


@dataclasses.dataclass(frozen=True)
class Request:
    """The ``number``-th request (from 1) that came; headers by lower-case name."""

    number: int
    method: str
    path: str
    headers: Mapping[str, str]
    length: int


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to a request: it is held up by ``seconds`` or until ``gate`` is set, then refused with ``refusal`` (status, code, words), or its
    connection is cut ``before`` it reaches the server or ``after`` (the server has done it, and nobody is told)."""

    seconds: float = 0.0
    gate: threading.Event | None = None
    refusal: tuple[int, str, str] | None = None
    cut: str | None = None


class Proxy:
    """Forwards to ``server`` (host:port). ``fault(request)`` says what is done to each request; it may be replaced at any time."""

    def __init__(self, server: str, fault: Callable[[Request], Fault | None] = lambda _: None) -> None:
        self.server, self.fault = server, fault
        self.requests: list[Request] = []
        self.most_at_once = 0
        self._open, self._lock = 0, threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: Any) -> None:
                pass

            def _body(self) -> bytes:
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = b""
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
                return body

            def _any(self) -> None:
                with proxy._lock:
                    proxy._open += 1
                    proxy.most_at_once = max(proxy.most_at_once, proxy._open)
                try:
                    with contextlib.suppress(ConnectionError):  # the client went: it was killed, or tired of waiting
                        self._handle()
                finally:
                    with proxy._lock:
                        proxy._open -= 1

            def _handle(self) -> None:
                body = self._body()
                headers = {name.lower(): value for name, value in self.headers.items()}
                with proxy._lock:
                    request = Request(len(proxy.requests) + 1, self.command, self.path, headers, len(body))
                    proxy.requests.append(request)
                fault = proxy.fault(request) or Fault()
                if fault.seconds:
                    time.sleep(fault.seconds)
                if fault.gate:
                    fault.gate.wait()
                if fault.cut == "before":
                    self._cut()
                    return
                if fault.refusal:
                    status, code, words = fault.refusal
                    text = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{words}</Message></Error>'.encode()
                    self._answer(status, {"Content-Type": "application/xml"}, text)
                    return
                status, answer_headers, answer = proxy._forward(self.command, self.path, headers, body)
                if fault.cut == "after":
                    self._cut()
                    return
                self._answer(status, answer_headers, answer)

            def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("connection", "transfer-encoding", "server", "date") and not (name.lower() == "content-length" and body):
                        self.send_header(name, value)
                if body or "content-length" not in {name.lower() for name in headers}:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def _cut(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.endpoint = f"127.0.0.1:{self._http.server_address[1]}"

    def _forward(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        host, port = self.server.split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        try:
            passed = {name: value for name, value in headers.items() if name not in ("transfer-encoding", "content-length", "expect", "connection")}
            connection.request(method, path, body=body, headers={**passed, "Content-Length": str(len(body))})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def uri(self, path: str) -> str:
        """The s3:// URI of ``path`` (bucket/...) through this proxy."""
        return f"s3://{path}?endpoint_override={self.endpoint}&scheme=http&region=us-west-2"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


class Credentials:
    """What EKS Pod Identity's agent is to a pod: an endpoint that gives keys for ``seconds`` to whoever shows a token."""

    def __init__(self, seconds: float) -> None:
        self.issued: dict[str, float] = {}
        """Access key: the time at which it runs out."""
        self.tokens: list[str] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                endpoint.tokens.append(self.headers.get("Authorization", ""))
                key, ends = f"KEY{len(endpoint.issued) + 1:017d}", time.time() + seconds
                endpoint.issued[key] = ends
                until = datetime.datetime.fromtimestamp(ends, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                body = json.dumps({"AccessKeyId": key, "SecretAccessKey": "secret", "Token": "token", "Expiration": until}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.uri = f"http://127.0.0.1:{self._http.server_address[1]}/credentials"

    def knows(self, request: Request, ever: bool = False) -> bool:
        """Whether the request is signed with a key that is good now (or was ``ever``)."""
        found = re.search(r"Credential=([^/]+)/", request.headers.get("authorization", ""))
        return found is not None and found[1] in self.issued and (ever or time.time() < self.issued[found[1]])

    def __enter__(self) -> Credentials:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[str]:
    """A moto server (S3 and more) on a port of its own; yields host:port. ``folder`` takes its log."""
    log = folder / "moto.log"
    with log.open("w") as out:
        server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stdout=out, stderr=subprocess.STDOUT)
        try:
            while not (found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())):
                assert server.poll() is None, log.read_text()
            yield f"127.0.0.1:{found[1]}"
        finally:
            server.terminate()
            server.wait()
