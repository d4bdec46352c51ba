"""The look at a GPU node's devices, on what a real API server and its DaemonSet controller say. The node is an object alone: nothing runs on it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator

import pytest
import yaml
from real import IMAGE, Stack

import config
from workloads import diagnosis, watch

pytestmark = pytest.mark.cluster
TRAINS = False
ONE = diagnosis.Devices(nodes=1, gpus=4, efa=1)


@pytest.fixture(scope="module")
def node(stack: Stack) -> Iterator[str]:
    name = f"gpu-{uuid.uuid4().hex[:6]}"
    made = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {config.ROLE_LABEL: "gpu", "test": name, "node.kubernetes.io/instance-type": "g6.12xlarge"}},
        "spec": {"taints": [{"key": config.GPU_TAINT[0], "value": config.GPU_TAINT[1], "effect": config.GPU_TAINT[2]}]},
    }
    stack.kubectl("create", "-f", "-", stdin=yaml.safe_dump(made))
    try:
        yield name
    finally:
        stack.kubectl("delete", "node", name, "--ignore-not-found")


def shows(stack: Stack, node: str, gpus: int, efa: int) -> None:
    devices = {diagnosis.GPU: str(gpus), diagnosis.EFA: str(efa)}
    ready = [{"type": "Ready", "status": "True", "reason": "Test", "message": "", "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]
    patch = {"status": {"capacity": devices, "allocatable": devices, "conditions": ready}}
    stack.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", json.dumps(patch))


def looked(stack: Stack, node: str, want: diagnosis.Devices = ONE) -> diagnosis.Moment:
    cluster = watch.Cluster(None, stack.settings["cluster"]["context"])
    system = "/namespaces/kube-system"
    # Not the nodes and plugins that others have here.
    nodes = [found for found in cluster.items("/api/v1/nodes") if found["metadata"]["name"] == node]
    daemons = [found for found in cluster.items(f"/apis/apps/v1{system}/daemonsets") if node in found["metadata"]["name"]]
    return diagnosis.devices(nodes, daemons, cluster.items(f"/api/v1{system}/pods"), want)


def test_a_node_with_all_its_devices_is_ready_and_one_device_less_is_not(stack: Stack, node: str) -> None:
    shows(stack, node, gpus=4, efa=1)
    assert looked(stack, node).ready
    shows(stack, node, gpus=4, efa=0)
    found = looked(stack, node)
    assert not found.ready
    assert f"node {node} (g6.12xlarge) shows 0 of 1 vpc.amazonaws.com/efa" in found.causes[0].text


def test_a_node_too_few_is_not_ready(stack: Stack, node: str) -> None:
    shows(stack, node, gpus=4, efa=1)
    found = looked(stack, node, diagnosis.Devices(nodes=2, gpus=4, efa=1))
    assert "1 of 2 GPU nodes are ready" in found.causes[0].text


def test_a_plugin_that_wants_no_pods_is_named(stack: Stack, node: str) -> None:
    """What the chart of the EFA plugin does for an instance type that it does not know."""
    shows(stack, node, gpus=4, efa=0)
    name = f"{diagnosis.PLUGINS[diagnosis.EFA]}-{node}"
    template = {
        "metadata": {"labels": {"app": name}},
        "spec": {"nodeSelector": {"node.kubernetes.io/instance-type": "p5.48xlarge"}, "containers": [{"name": "main", "image": IMAGE}]},
    }
    daemon = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": {"app": name}}, "template": template},
    }
    stack.kubectl("create", "-f", "-", stdin=yaml.safe_dump(daemon))
    try:
        stack.wait_for("the DaemonSet controller", lambda: looked_at(stack, name).get("status", {}).get("observedGeneration"))
        assert looked_at(stack, name)["status"]["desiredNumberScheduled"] == 0
        assert f"DaemonSet {name} wants 0 pods" in looked(stack, node).causes[0].text
    finally:
        stack.kubectl("-n", "kube-system", "delete", "daemonset", name)


def looked_at(stack: Stack, name: str) -> dict:
    return dict(json.loads(stack.kubectl("-n", "kube-system", "get", "daemonset", name, "-o", "json")))
