"""A container registry behind a real HTTP server, with the token that public registries want of everyone."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DIGEST = "sha256:" + "ab" * 32


class Registry:
    """``images``: repository:tag or repository@digest to digest. ``mode``: token (anonymous), closed (wants a user), busy (429), quiet (no digest header)."""

    def __init__(self, images: dict[str, str], mode: str = "token") -> None:
        self.images, self.mode, self.asked = images, mode, []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                """Silent."""

            def do_GET(self) -> None:
                registry.asked.append(self.path)
                if self.path.startswith("/token"):
                    return self.send(200, json.dumps({"token": "anonymous"}).encode())
                if registry.mode == "busy":
                    return self.send(429, b"{}")
                if self.headers.get("Authorization") != "Bearer anonymous" or registry.mode == "closed":
                    realm = f'Bearer realm="http://{registry.host}/token",service="test",scope="repository:team/ray:pull"'
                    return self.send(401, b"{}", {"WWW-Authenticate": realm if registry.mode != "closed" else 'Basic realm="users"'})
                _, _, name = self.path.partition("/v2/")
                repository, _, wanted = name.partition("/manifests/")
                digest = registry.images.get(f"{repository}@{wanted}" if wanted.startswith("sha256:") else f"{repository}:{wanted}")
                if digest is None:
                    return self.send(404, b"{}")
                return self.send(200, b'{"schemaVersion": 2}', {} if registry.mode == "quiet" else {"Docker-Content-Digest": digest})

            def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(body)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
