"""What stands in for EC2 and S3 in the chain: nodes of a real Kubernetes that join as the simulated account's node groups, and its buckets in a real S3 server.

Only what AWS and its hardware would do is done here, from what the program made of the account: labels, taints and devices are the node groups',
the buckets are the account's. CLUSTER_IMAGE names the image of the Ray pods, LAB_HOME the lab's folder with tools and charts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.aws_sim import nodes, simulated

HOME = Path(os.environ.get("LAB_HOME", "/var/tmp/lab"))
TRAINING = simulated.ROOT / ".venv" / "bin" / "python"
IMAGE = os.environ.get("CLUSTER_IMAGE", "")
KUBECONFIG = Path(os.environ.get("KUBECONFIG") or "/nonexistent")
BUCKET = "aws:s3/bucket:Bucket"
# What the pods of a plugin's release, by the beginning of their names, tell their node's kubelet of.
PLUGINS = {"nvidia-device-plugin": nodes.GPU, "aws-efa-k8s-device-plugin": nodes.EFA}
CHARTS = (*PLUGINS, "kuberay-operator")


def kubectl(*arguments: str, code: int | None = 0) -> str:
    command = [str(HOME / "bin" / "kube"), "kubectl", "--kubeconfig", str(KUBECONFIG), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert code is None or done.returncode == code, f"kubectl {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


def get(*arguments: str) -> list[dict[str, Any]]:
    return list(json.loads(kubectl("get", *arguments, "-o", "json"))["items"])


def missing() -> str | None:
    """Why the chain can't run here; None where it can."""
    if reason := simulated.missing():
        return reason
    if not KUBECONFIG.is_file():
        return "KUBECONFIG names no Kubernetes of this machine's lab"
    if not IMAGE:
        return "CLUSTER_IMAGE names no image with Ray, PyTorch and transformers"
    if not TRAINING.exists():
        return "no .venv: `make test-training` makes it, and it holds the S3 server"
    if absent := [name for name in CHARTS if not (HOME / "charts" / name / "Chart.yaml").exists()]:
        return f"no chart {' and no chart '.join(absent)} in {HOME}/charts (the lab's `operator --prepare-only` puts them there)"
    found = kubectl("get", "nodes", "-o", "name", code=None).split()
    return None if len(found) >= 2 else f"one node for the system and one or more for GPUs are needed, and KUBECONFIG shows {len(found)}"


def node_names() -> list[str]:
    return [node["metadata"]["name"] for node in get("nodes")]


@dataclasses.dataclass
class Store:
    """An S3 server on the address of this machine that pods reach."""

    url: str

    def make(self, bucket: str) -> None:
        body = b'<CreateBucketConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><LocationConstraint>us-west-2</LocationConstraint></CreateBucketConfiguration>'
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{bucket}", data=body, method="PUT"), timeout=30).close()

    def read(self, path: str) -> bytes:
        # What was put is its owner's; the server looks who asks, but not at the signature.
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=simulated/20260101/us-west-2/s3/aws4_request, SignedHeaders=host, Signature=0"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/{path}", headers=signed), timeout=30) as answer:
            return bytes(answer.read())

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        return re.findall(r"<Key>([^<]+)</Key>", self.read(f"{bucket}?list-type=2&prefix={prefix}").decode())

    @property
    def environment(self) -> dict[str, str]:
        """What makes an S3 client talk to this server; on AWS it is Pod Identity that does."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": "simulated",
            "AWS_SECRET_ACCESS_KEY": "simulated",
            "AWS_REGION": "us-west-2",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextlib.contextmanager
def store(folder: Path) -> Iterator[Store]:
    (address,) = [entry["address"] for entry in get("nodes")[0]["status"]["addresses"] if entry["type"] == "InternalIP"]
    log = folder / "s3.log"
    with log.open("w") as out:
        server = subprocess.Popen([str(TRAINING), "-m", "moto.server", "-H", address, "-p", "0"], stdout=out, stderr=subprocess.STDOUT)
        try:
            found = None
            while found is None:
                assert server.poll() is None, f"no S3 server on {address}; is the first node this machine?\n{log.read_text()}"
                found = re.search(rf"http://{re.escape(address)}:\d+", log.read_text())
            yield Store(found[0])
        finally:
            server.terminate()
            server.wait()


def prepare(store: Store, folder: Path, output: str) -> None:
    """Prepared data of this project's own sources."""
    config = folder / "prepare.json"
    config.write_text(json.dumps({"sources": ["training"], "output": output, "tokenizer": "train:400", "sequenceLength": 64, "evalFraction": 0.1}))
    command = [str(TRAINING), "-m", "training.prepare", "--config", str(config)]
    done = subprocess.run(command, cwd=simulated.ROOT, env={**os.environ, **store.environment}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


class Hardware(threading.Thread):
    """While it runs, each finished node group gets its nodes, each plugin that runs on a node that node's devices, and each bucket its place in the store.

    The first node of the Kubernetes is the system group's, the others are the GPU group's. A GPU group of no nodes gets them when a pod waits for
    one, as Cluster Autoscaler would do; ``said_before`` is what ``log`` returned just then.
    """

    def __init__(self, account: simulated.Account, store: Store, simulation: dict[str, Any], log: Callable[[], str] = str) -> None:
        super().__init__(daemon=True)
        self.account, self.store, self.simulation, self.log = account, store, simulation, log
        self.said_before: str | None = None
        self.before = {node["metadata"]["name"]: node for node in get("nodes")}
        self.joined: dict[str, dict[str, int]] = {}  # node -> the devices that it has
        self.started: set[tuple[str, str]] = set()  # (node, plugin)
        self.buckets: set[str] = set()
        self.error: BaseException | None = None
        self._end = threading.Event()

    def __enter__(self) -> Hardware:
        for name, node in list(self.before.items())[1:]:
            self._devices(name, {device: None for device in PLUGINS.values() if device in node["status"]["capacity"]})
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()
        for name, node in self.before.items():
            now = json.loads(kubectl("get", "node", name, "-o", "json"))
            labels = {key: node["metadata"]["labels"].get(key) for key in now["metadata"]["labels"]}
            kubectl("patch", "node", name, "--type=merge", "-p", json.dumps({"metadata": {"labels": labels}, "spec": {"taints": node["spec"].get("taints")}}))
        for name, node in list(self.before.items())[1:]:
            self._devices(name, {device: node["status"]["capacity"].get(device) for device in PLUGINS.values()})
        if self.error:
            raise self.error

    def run(self) -> None:
        try:
            while not self._end.wait(1):
                for bucket in {made["bucket"] for made in self.account.resources(BUCKET)} - self.buckets:
                    self.store.make(bucket)
                    self.buckets.add(bucket)
                for group in nodes.groups(self.account):
                    self._join(group)
                self._start_plugins()
        except BaseException as error:  # told at the end; whoever waits for pods waits in vain
            self.error = error

    def _join(self, group: dict[str, Any]) -> None:
        first, *others = self.before
        wanted = others if group.get("taints") else [first]
        if any(name in self.joined for name in wanted):
            return
        if nodes.size(group) == 0:
            if not nodes.awaited(group, get("pods", "--all-namespaces", "--field-selector", "status.phase=Pending")):
                return
            self.said_before = self.log()
        else:
            assert nodes.size(group) == len(wanted), f"{group['nodeGroupName']} wants {nodes.size(group)} nodes, and there are {len(wanted)} for it"
        look = {"metadata": {"labels": nodes.labels(group)}, "spec": {"taints": nodes.taints(group)}}
        having = nodes.devices(self.account, group, self.simulation)
        for name in wanted:
            kubectl("patch", "node", name, "--type=merge", "-p", json.dumps(look))
            self.joined[name] = having

    def _start_plugins(self) -> None:
        waiting = {(name, plugin) for name, having in self.joined.items() for plugin, device in PLUGINS.items() if device in having} - self.started
        running = get("pods", "-n", "kube-system", "--field-selector", "status.phase=Running") if waiting else []
        for name, plugin in waiting:
            if any(pod["spec"]["nodeName"] == name and pod["metadata"]["name"].startswith(plugin) for pod in running):
                self._devices(name, {PLUGINS[plugin]: str(self.joined[name][PLUGINS[plugin]])})
                self.started.add((name, plugin))

    @staticmethod
    def _devices(node: str, counts: dict[str, str | None]) -> None:
        patch = json.dumps({"status": {"capacity": counts, "allocatable": counts}})
        kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)
