"""Ray's job API (Ray 2.58, dashboard/modules/job): status, logs, stop and submission, over any socket that reaches port 8265 of the head."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import io
import json
import socket
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import websocket

from ops.errors import Refused

PORT = 8265
TIMEOUT_SECONDS = 30
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")

Connect = Callable[[], socket.socket]


class NoAnswer(Refused):
    """Ray did not answer, or stopped in the middle of it: worth another try."""


class NoSuchJob(Refused):
    """Ray does not know the job (any more: a head that was lost forgets its jobs)."""


@dataclasses.dataclass(frozen=True)
class RayJob:
    """What Ray says of a job. state: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED. exit_code: its command's, once it has ended. Times: Unix seconds."""

    submission_id: str
    state: str
    message: str
    exit_code: int | None
    started: float | None
    ended: float | None

    @property
    def over(self) -> bool:
        return self.state in ENDED


class _Connection(http.client.HTTPConnection):
    def __init__(self, connect: Connect, timeout: float) -> None:
        super().__init__("127.0.0.1", PORT, timeout=timeout)
        self._make = connect

    def connect(self) -> None:
        self.sock = self._make()
        self.sock.settimeout(self.timeout)


class RayJobs:
    """The job API. ``connect`` makes a socket to the head's port 8265, anew for each request. token: as :func:`ops.kube.ray_token` reads it.

    timeout: seconds without a byte after which a request has failed, and a stream is looked after.
    """

    def __init__(self, connect: Connect, token: str, timeout: float = TIMEOUT_SECONDS) -> None:
        self._connect = connect
        self._token = token
        self._timeout = timeout

    def get(self, submission_id: str) -> RayJob:
        """Raises NoSuchJob, NoAnswer."""
        return _job(self._json("GET", f"/api/jobs/{submission_id}"))

    def all(self) -> list[RayJob]:
        """Every job that was submitted to this Ray cluster, oldest first."""
        found = [_job(entry) for entry in self._json("GET", "/api/jobs/") if entry.get("submission_id")]
        return sorted(found, key=lambda job: job.started or 0)

    def log(self, submission_id: str) -> str:
        """All that the job's driver has printed so far."""
        return str(self._json("GET", f"/api/jobs/{submission_id}/logs").get("logs") or "")

    def stop(self, submission_id: str) -> None:
        """Asks the job to stop (SIGTERM, then SIGKILL); does not wait for it."""
        self._json("POST", f"/api/jobs/{submission_id}/stop")

    def submit(self, submission_id: str, entrypoint: str, runtime_env: Mapping[str, Any], files: Mapping[str, str]) -> None:
        """Runs ``entrypoint`` in a folder that holds ``files``, under this id."""
        package = zipped(files)
        name = f"_ray_pkg_{hashlib.sha256(package).hexdigest()[:16]}.zip"
        path = f"/api/packages/gcs/{name}"
        if self._request("GET", path)[0] != 200:
            status, text = self._request("PUT", path, package, "application/octet-stream")
            if status != 200:
                raise Refused(f"Ray did not take the job's code ({status}): {_end(text)}")
        body = {
            "entrypoint": entrypoint,
            "submission_id": submission_id,
            "runtime_env": {**runtime_env, "working_dir": f"gcs://{name}"},
        }
        self._json("POST", "/api/jobs/", json.dumps(body).encode())

    def tail(self, submission_id: str) -> Any:
        """A WebSocket with the job's log from its beginning; its end says nothing about the job."""
        stream: Any = websocket.WebSocket()
        sock = self._socket()
        sock.settimeout(self._timeout)
        try:
            stream.connect(
                f"ws://127.0.0.1:{PORT}/api/jobs/{submission_id}/logs/tail", socket=sock, header=[f"Authorization: Bearer {self._token}"], suppress_origin=True
            )
        except (websocket.WebSocketException, OSError) as error:
            sock.close()
            raise NoAnswer(f"Ray's log stream can't be opened ({error})") from error
        return stream

    def _socket(self) -> socket.socket:
        try:
            return self._connect()
        except OSError as error:
            raise NoAnswer(f"Ray's job API can't be reached ({error})") from error

    def _json(self, method: str, path: str, body: bytes | None = None) -> Any:
        status, text = self._request(method, path, body)
        if status == 404:
            raise NoSuchJob(f"Ray knows no job {path.removeprefix('/api/jobs/').split('/')[0]}: its head was replaced since, or the job never started")
        if status in (401, 403):
            raise Refused("Ray refuses the token of this stack's Secret: the Ray cluster was made anew; try again")
        if status != 200:
            raise NoAnswer(f"Ray answered {status} to {method} {path}: {_end(text)}")
        try:
            return json.loads(text)
        except ValueError as error:
            raise NoAnswer(f"Ray's answer to {method} {path} is no JSON: {_end(text)}") from error

    def _request(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> tuple[int, str]:
        connection = _Connection(self._socket, self._timeout)
        try:
            headers = {"Authorization": f"Bearer {self._token}", **({"Content-Type": kind} if body is not None else {})}
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"Ray's job API broke off ({type(error).__name__}: {error})") from error
        finally:
            connection.close()


def zipped(files: Mapping[str, str]) -> bytes:
    """A zip archive; the same files give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name])
    return buffer.getvalue()


def _job(entry: Mapping[str, Any]) -> RayJob:
    def seconds(key: str) -> float | None:
        return entry[key] / 1000 if entry.get(key) else None

    return RayJob(
        submission_id=str(entry.get("submission_id") or ""),
        state=str(entry.get("status") or "PENDING"),
        message=str(entry.get("message") or ""),
        exit_code=entry.get("driver_exit_code"),
        started=seconds("start_time"),
        ended=seconds("end_time"),
    )


def _end(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing"
