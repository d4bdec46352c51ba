"""A Kubernetes for the simulated EKS to hand out: a real API server with its garbage collection, and a stand-in for nodes and for KubeRay's operator.

It keeps what the program makes, with the API's own rules on names, namespaces, fields and deletion. Nothing ever runs: a node is an object that looks
like those of the account's node groups, and the Ray cluster's pods are objects that are ready at once. The charts are stand-ins too: a ConfigMap
each, and KubeRay's kinds without their fields.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.aws_sim import nodes
from tests.aws_sim.simulated import TOOLS, Account

CONTROLLERS = ("namespace-controller", "garbage-collector-controller")
TOKEN = "simulated"
NOW = "2026-01-01T00:00:00Z"
CLUSTERS = "apis/ray.io/v1/rayclusters"
READY = [{"type": kind, "status": "True", "lastTransitionTime": NOW} for kind in ("PodScheduled", "ContainersReady", "Ready")]


def _kind(plural: str, kind: str) -> dict[str, Any]:
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": anything, "status": anything}}}
    version = {"name": "v1", "served": True, "storage": True, "subresources": {"status": {}}, "schema": schema}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.ray.io"},
        "spec": {"group": "ray.io", "scope": "Namespaced", "names": {"plural": plural, "singular": kind.lower(), "kind": kind}, "versions": [version]},
    }


def charts(folder: Path, names: list[str]) -> dict[str, dict[str, str]]:
    """Makes a stand-in of each chart, and returns what a stack's ``ray.charts`` says for it."""
    for name in names:
        (folder / name / "templates").mkdir(parents=True)
        (folder / name / "Chart.yaml").write_text(yaml.safe_dump({"apiVersion": "v2", "name": name, "version": "1.0.0"}))
        values = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}"}, "data": {"values": "{{ .Values | toJson }}"}}
        (folder / name / "templates" / "values.yaml").write_text(yaml.safe_dump(values).replace("'{{ .Values | toJson }}'", "{{ .Values | toJson | quote }}"))
    crds = folder / "kuberay-operator" / "crds"
    crds.mkdir()
    (crds / "kinds.yaml").write_text(yaml.safe_dump_all([_kind("rayclusters", "RayCluster"), _kind("rayjobs", "RayJob")]))
    return {name: {"chart": str(folder / name)} for name in names}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Kubernetes:
    """The API of the server that a kubeconfig names."""

    def __init__(self, kubeconfig: Path) -> None:
        self.url = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        self._tls = ssl._create_unverified_context()

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """What the API answers; PATCH sends a merge patch. Raises OSError."""
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/merge-patch+json" if method == "PATCH" else "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30, context=self._tls) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise OSError(error.code, f"{method} {path}: {error.read().decode()[:1000]}") from error
        return json.loads(text) if text.startswith(b"{") else text.decode()

    def items(self, path: str) -> list[dict[str, Any]]:
        """A kind's objects, in all namespaces; none where the kind is unknown."""
        try:
            return list(self.call("GET", path)["items"])
        except OSError as error:
            if error.errno != 404:
                raise
            return []


def _pod(cluster: dict[str, Any], role: str, number: int, template: dict[str, Any]) -> dict[str, Any]:
    """A pod of a Ray cluster as the operator makes it; of another name where it is made from another template."""
    meta, given = cluster["metadata"], template.get("metadata", {})
    made_from = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:8]
    owner = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": meta["name"], "uid": meta["uid"], "controller": True, "blockOwnerDeletion": True}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **given,
            "name": f"{meta['name']}-{role}-{number}-{made_from}",
            "namespace": meta["namespace"],
            "labels": {**given.get("labels", {}), "ray.io/cluster": meta["name"], "ray.io/node-type": role},
            "ownerReferences": [owner],
        },
        "spec": template["spec"],
    }


def ray_pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods that a RayCluster asks for."""
    spec = cluster["spec"]
    found = [_pod(cluster, "head", 0, spec["headGroupSpec"]["template"])]
    for group in spec["workerGroupSpecs"]:
        found += [_pod(cluster, "worker", i, group["template"]) for i in range(int(group.get("replicas", group["minReplicas"])))]
    return found


class Inhabitants(threading.Thread):
    """While it runs, the account's node groups have their nodes, and each Ray cluster has its pods."""

    def __init__(self, kubernetes: Kubernetes, account: Account) -> None:
        super().__init__(daemon=True)
        self.kubernetes, self.account = kubernetes, account
        self.error: Exception | None = None
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.5):
            try:
                self._nodes()
                for cluster in self.kubernetes.items(CLUSTERS):
                    if "deletionTimestamp" not in cluster["metadata"]:
                        self._ray(cluster)
                self.error = None
            except Exception as error:  # an object that has just gone, a server that says: later; what lasts is told by stop()
                self.error = error

    def stop(self) -> None:
        self._end.set()
        self.join()
        if self.error:
            raise self.error

    def _nodes(self) -> None:
        wanted: dict[str, dict[str, Any]] = {}
        for group in nodes.groups(self.account) if self.account.started else []:
            found = {device: str(count) for device, count in nodes.devices(self.account, group).items()}
            for i in range(nodes.size(group)):
                name = f"{group['nodeGroupName']}-{i}".removeprefix("ray-train-efa-")
                wanted[name] = {
                    "metadata": {"name": name, "labels": nodes.labels(group)},
                    "spec": {"taints": nodes.taints(group)},
                    "status": {"capacity": found, "allocatable": found, "conditions": [{**READY[-1], "reason": "KubeletReady", "message": ""}]},
                }
        there = {node["metadata"]["name"] for node in self.kubernetes.items("api/v1/nodes")}
        for name in wanted.keys() - there:
            self.kubernetes.call("POST", "api/v1/nodes", {"apiVersion": "v1", "kind": "Node", **wanted[name]})
        for name in there - wanted.keys():
            self.kubernetes.call("DELETE", f"api/v1/nodes/{name}")

    def _ray(self, cluster: dict[str, Any]) -> None:
        meta = cluster["metadata"]
        pods = f"api/v1/namespaces/{meta['namespace']}/pods"
        wanted = {pod["metadata"]["name"]: pod for pod in ray_pods(cluster)}
        there = {pod["metadata"]["name"]: pod for pod in self.kubernetes.items(pods)}
        for name in there.keys() - wanted.keys():
            self.kubernetes.call("DELETE", f"{pods}/{name}")
        for name, pod in wanted.items():
            if name not in there:
                self.kubernetes.call("POST", pods, pod)
            if name not in there or there[name]["status"]["phase"] != "Running":
                self.kubernetes.call("PATCH", f"{pods}/{name}/status", {"status": {"phase": "Running", "conditions": READY}})
        status = {"state": "ready", "observedGeneration": meta["generation"]}
        if cluster.get("status") != status:
            path = f"apis/ray.io/v1/namespaces/{meta['namespace']}/rayclusters/{meta['name']}/status"
            self.kubernetes.call("PATCH", path, {"status": status})


def _kubeconfig(port: int, authority: bytes | None) -> str:
    trust = {"certificate-authority-data": base64.b64encode(authority).decode()} if authority else {"insecure-skip-tls-verify": True}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "simulated",
            "clusters": [{"name": "simulated", "cluster": {"server": f"https://127.0.0.1:{port}", **trust}}],
            "contexts": [{"name": "simulated", "context": {"cluster": "simulated", "user": "simulated"}}],
            "users": [{"name": "simulated", "user": {"token": TOKEN}}],
        }
    )


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Path]:
    """The kubeconfig of a new Kubernetes, which ends with the block. folder: of its own, to be made."""
    folder.mkdir(parents=True)
    store, peers, port, other = (_free_port() for _ in range(4))
    subprocess.run(["openssl", "genrsa", "-out", "accounts.key", "2048"], cwd=folder, check=True, capture_output=True)
    (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(_kubeconfig(port, None))
    kubernetes = Kubernetes(kubeconfig)
    client, peer = f"http://127.0.0.1:{store}", f"http://127.0.0.1:{peers}"
    etcd = {
        "name": "one",
        "data-dir": "etcd",
        "unsafe-no-fsync": "true",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"one={peer}",
    }
    server = {
        "etcd-servers": client,
        "bind-address": "127.0.0.1",
        "advertise-address": "127.0.0.1",
        "secure-port": str(port),
        "cert-dir": "certificates",
        "token-auth-file": "tokens.csv",
        "authorization-mode": "RBAC",
        "service-cluster-ip-range": "10.0.0.0/24",
        "service-account-issuer": "https://kubernetes.default.svc",
        "service-account-key-file": "accounts.key",
        "service-account-signing-key-file": "accounts.key",
        "endpoint-reconciler-type": "none",
        "disable-admission-plugins": "ServiceAccount",  # it would give tokens to pods that never start
    }
    controllers = {"kubeconfig": "kubeconfig", "controllers": ",".join(CONTROLLERS), "secure-port": str(other), "leader-elect": "false"}
    with contextlib.ExitStack() as stack:

        def start(program: str, flags: dict[str, str], *command: str) -> None:
            log = stack.enter_context((folder / f"{'-'.join((program, *command))}.log").open("w"))
            arguments = [str(TOOLS / program), *command, *(f"--{flag}={value}" for flag, value in flags.items())]
            process = subprocess.Popen(arguments, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        start("etcd", etcd)
        start("kube", server, "apiserver")
        _until(lambda: kubernetes.call("GET", "readyz") == "ok", folder / "kube-apiserver.log")
        # It has made its certificate as it started.
        kubeconfig.write_text(_kubeconfig(port, (folder / "certificates" / "apiserver.crt").read_bytes()))
        start("kube", controllers, "controller-manager")
        yield kubeconfig


def _until(ready: Callable[[], bool], log: Path) -> None:
    limit = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError):
            if ready():
                return
        assert time.monotonic() < limit, f"no API server:\n{log.read_text()[-3000:]}"
        time.sleep(0.2)
