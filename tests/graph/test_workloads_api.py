"""How the program reads the Kubernetes API while `up` runs, against a server that answers as one does."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator

import pytest

from workloads import watch

ANSWERS = {
    "/api/v1/nodes": (200, {"items": [{"metadata": {"name": "n1"}}]}),
    "/api/v1/namespaces/ray/pods?labelSelector=ray.io%2Fcluster%3Ddemo": (200, {"items": []}),
    "/apis/ray.io/v1/namespaces/ray/rayclusters/none": (404, {"reason": "NotFound"}),
    "/api/v1/namespaces/kube-system/pods": (403, {"reason": "Forbidden"}),
    "/apis/apps/v1/namespaces/kube-system/daemonsets": (500, {"reason": "InternalError"}),
}


class Api(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.seen.append(self.headers.get("Authorization"))  # type: ignore[attr-defined]
        if self.path.endswith("tailLines=8"):
            code, body = 200, b"Traceback\nValueError: no\n"
        else:
            code, answer = ANSWERS[self.path]
            body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[http.server.ThreadingHTTPServer]:
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api)
    made.seen = []  # type: ignore[attr-defined]
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()


def kubeconfig(port: int, context: str = "demo") -> str:
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "demo", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "demo", "user": {"token": "secret-token"}}],
            "contexts": [{"name": context, "context": {"cluster": "demo", "user": "demo"}}],
            "current-context": context,
        }
    )


@pytest.fixture
def cluster(server: http.server.ThreadingHTTPServer) -> watch.Cluster:
    return watch.Cluster(kubeconfig(server.server_address[1]), None)


def test_objects_come_as_the_api_gives_them_with_the_users_own_login(cluster: watch.Cluster, server: http.server.ThreadingHTTPServer) -> None:
    assert cluster.items("/api/v1/nodes") == [{"metadata": {"name": "n1"}}]
    assert server.seen[-1] == "Bearer secret-token"  # type: ignore[attr-defined]
    assert cluster.items("/api/v1/namespaces/ray/pods", labelSelector="ray.io/cluster=demo") == []


def test_what_is_not_there_is_none(cluster: watch.Cluster) -> None:
    assert cluster.get("/apis/ray.io/v1/namespaces/ray/rayclusters/none") is None


def test_a_log_comes_as_text(cluster: watch.Cluster) -> None:
    assert cluster.get("/api/v1/namespaces/ray/pods/x/log", text=True, container="c", tailLines=8) == "Traceback\nValueError: no\n"


def test_what_is_forbidden_is_told_at_once_and_what_may_mend_itself_is_asked_again(cluster: watch.Cluster) -> None:
    with pytest.raises(watch.Stuck, match=r"Kubernetes refuses to show /api/v1/namespaces/kube-system/pods \(403"):
        cluster.items("/api/v1/namespaces/kube-system/pods")
    with pytest.raises(OSError, match="500"):
        cluster.items("/apis/apps/v1/namespaces/kube-system/daemonsets")


def test_a_server_that_is_away_may_come_back(server: http.server.ThreadingHTTPServer) -> None:
    with pytest.raises(OSError, match="refused"):
        watch.Cluster(kubeconfig(1), None).items("/api/v1/nodes")
