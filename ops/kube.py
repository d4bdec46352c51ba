"""The stack's Kubernetes: plain JSON in and out, port-forwards and commands in pods, errors as a sentence. Nothing is written to disk."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import kubernetes
import urllib3
from kubernetes.client.rest import ApiException

from ops.aws import Aws, AwsError
from ops.errors import BadInput, Refused
from ops.target import Target

# An answer of the API server; what takes longer is asked again by whoever needs it.
TIMEOUT_SECONDS = 20
# EKS tokens live 15 minutes: a client is not kept for longer than 10.
CLIENT_SECONDS = 600


class NotThere(Refused):
    """The object asked for does not exist."""


class Unreachable(Refused):
    """The API server did not answer at all."""


class ClusterGone(Unreachable):
    """AWS says that there is no such cluster."""


class Kube:
    """A connection made by ``load``, which fills a client configuration with address and credentials, and is called anew as these age."""

    def __init__(self, where: str, load: Callable[[Any], None]) -> None:
        self.where = where
        self._load = load
        self._client: Any = None
        self._made = 0.0

    def client(self, fresh: bool = False) -> Any:
        """An ApiClient; ``fresh``: one of the caller's own, for the stream calls replace parts of theirs."""
        if not fresh and self._client is not None and time.monotonic() - self._made < CLIENT_SECONDS:
            return self._client
        settings = kubernetes.client.Configuration()
        settings.retries = False
        try:
            # The loader logs what goes wrong in the credentials' command, with its whole trace, besides raising it.
            with _quiet("kubernetes.config.kube_config", "root"):
                self._load(settings)
        except kubernetes.config.ConfigException as error:
            raise BadInput(f"{self.where}: {_line(error)}; kubectl config get-contexts lists what your kubeconfig has") from error
        client = kubernetes.client.ApiClient(settings)
        if not fresh:
            self._client, self._made = client, time.monotonic()
        return client

    def ask(self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None, content_type: str | None = None) -> dict[str, Any]:
        """The JSON that the API answers. Raises NotThere, Unreachable, Refused."""
        headers = {"Accept": "application/json", **({"Content-Type": content_type} if content_type else {})}
        try:
            answer = self.client().call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                response_type="object",
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _request_timeout=TIMEOUT_SECONDS,
            )
        except ApiException as error:
            raise _refused(self.where, path, error) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"{self.where}: the Kubernetes API server does not answer ({_line(error)}); is the cluster up and the network open?") from error
        return dict(answer or {})

    def get(self, path: str, **query: str) -> dict[str, Any]:
        return self.ask("GET", path, query=query)

    def items(self, path: str, **query: str) -> list[dict[str, Any]]:
        """All objects of a list, page by page."""
        found: list[dict[str, Any]] = []
        more: str | None = None
        while True:
            page = self.get(path, limit="500", **query, **({"continue": more} if more else {}))
            found += page.get("items") or []
            more = (page.get("metadata") or {}).get("continue")
            if not more:
                return found

    def forward(self, namespace: str, pod: str, port: int) -> socket.socket:
        """A socket to a port of the pod, through the API server: past network policies, which is why only who may port-forward gets in."""
        client = self.client(fresh=True)
        core = kubernetes.client.CoreV1Api(client)
        _no_trace_of_cut_forwards()
        try:
            made = kubernetes.stream.portforward(core.connect_get_namespaced_pod_portforward, pod, namespace, ports=str(port), _request_timeout=TIMEOUT_SECONDS)
        except ApiException as error:
            raise _refused(self.where, f"port {port} of pod {pod}", error) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"{self.where}: the Kubernetes API server does not answer ({_line(error)}); is the cluster up and the network open?") from error
        found: socket.socket = made.socket(port)._socket
        return found

    def run(self, namespace: str, pod: str, container: str, command: list[str], seconds: float = 60) -> str:
        """What a command in a container prints. Raises Refused where it ends with another code than 0, with the end of what it said."""
        core = kubernetes.client.CoreV1Api(self.client(fresh=True))
        try:
            stream = kubernetes.stream.stream(
                core.connect_get_namespaced_pod_exec,
                pod,
                namespace,
                container=container,
                command=command,
                stderr=True,
                stdin=False,
                stdout=True,
                tty=False,
                _preload_content=False,
            )
            stream.run_forever(timeout=seconds)
            out, err, code = stream.read_stdout() or "", stream.read_stderr() or "", stream.returncode
            stream.close()
        except ApiException as error:
            raise _refused(self.where, f"a command in pod {pod}", error) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"{self.where}: the Kubernetes API server does not answer ({_line(error)}); is the cluster up and the network open?") from error
        if code is None:
            raise Refused(f"{command[0]} in pod {pod} did not end within {seconds:.0f} s; try again")
        if code:
            raise Refused(f"{command[0]} in pod {pod} ended with {code}: {(err or out).strip()[-300:]}")
        return str(out)


def connect(target: Target, outputs: Mapping[str, Any]) -> Kube:
    """The cluster of a stack: the context that its file names, or the EKS cluster of its outputs. Raises BadInput, Refused."""
    if target.settings.cluster.kind == "existing":
        context = target.settings.cluster.context

        def from_file(settings: Any) -> None:
            kubernetes.config.load_kube_config(context=context, client_configuration=settings)

        return Kube(f"context {context}", from_file)
    name, region = outputs.get("clusterName"), outputs.get("region")
    if not name:
        raise NotThere(f"stack {target.name} has no cluster yet: `python -m ops up {target.name}` makes it")

    def from_aws(settings: Any) -> None:
        kubernetes.config.load_kube_config_from_dict(_eks_kubeconfig(str(name), Aws(str(region), target.profile)), client_configuration=settings)

    return Kube(f"EKS cluster {name}", from_aws)


def _eks_kubeconfig(name: str, aws: Aws) -> dict[str, Any]:
    """A kubeconfig in memory, with the same token command as `aws eks update-kubeconfig` writes."""
    try:
        found = aws.ask("eks", "describe_cluster", name=name)["cluster"]
    except AwsError as error:
        if error.code == "ResourceNotFoundException":
            raise ClusterGone(f"EKS cluster {name} in {aws.region} does not exist any more; `python -m ops down` removes what is left of the stack") from error
        raise
    arguments = ["--region", aws.region, "eks", "get-token", "--cluster-name", name, "--output", "json"]
    arguments += ["--profile", aws.profile] if aws.profile else []
    token = {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "aws", "args": arguments, "interactiveMode": "IfAvailable"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": found["endpoint"], "certificate-authority-data": found["certificateAuthority"]["data"]}}],
        "users": [{"name": name, "user": {"exec": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }


def ray_token(kube: Kube, namespace: str, ray_cluster: str) -> str:
    """Ray's own token, which the operator made; kept in memory alone."""
    data = kube.get(f"/api/v1/namespaces/{namespace}/secrets/{ray_cluster}").get("data") or {}
    return base64.b64decode(data.get("auth_token", "")).decode()


def _refused(where: str, what: str, error: Any) -> Refused:
    try:
        said = json.loads(error.body or "{}").get("message") or error.reason
    except (ValueError, TypeError, AttributeError):
        said = error.reason
    said = " ".join(str(said).split())[:300]
    if error.status == 404:
        return NotThere(f"{where}: {said}")
    if error.status == 401:
        return Refused(f"{where}: these credentials are not let in ({said}); whoever made an EKS cluster is its admin, others must be in cluster.admins")
    if error.status == 403:
        return Refused(f"{where}: {said}; ask its admin for that right")
    if not error.status:
        return Unreachable(f"{where}: the connection through the Kubernetes API server failed ({said})")
    return Refused(f"{where}: {what}: {said}")


def _line(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return " ".join(str(reason or error).split())[:200]


@functools.cache
def _no_trace_of_cut_forwards() -> None:
    """A pod that goes while a port of it is forwarded ends the client's thread with an exception; whoever reads from the socket is told of it there."""
    before = threading.excepthook

    def hook(ended: threading.ExceptHookArgs) -> None:
        forwards = ended.thread is not None and ended.thread.name.startswith("Kubernetes port forward proxy")
        if not (forwards and isinstance(ended.exc_value, OSError)):
            before(ended)

    threading.excepthook = hook


@contextlib.contextmanager
def _quiet(*names: str) -> Any:
    loggers = [logging.getLogger(None if name == "root" else name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
