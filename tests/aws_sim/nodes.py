"""What the nodes of a simulated node group look like to Kubernetes: what EC2 and EKS would make of what the program wrote into the account."""

from __future__ import annotations

from typing import Any

import yaml

from tests.aws_sim.simulated import LAB, Account

NODE_GROUP, TEMPLATE = "aws:eks/nodeGroup:NodeGroup", "aws:ec2/launchTemplate:LaunchTemplate"
EFFECTS = {"NO_SCHEDULE": "NoSchedule", "NO_EXECUTE": "NoExecute", "PREFER_NO_SCHEDULE": "PreferNoSchedule"}
GPU, EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"


def groups(account: Account) -> list[dict[str, Any]]:
    """The node groups that are up."""
    return account.resources(NODE_GROUP)


def labels(group: dict[str, Any]) -> dict[str, str]:
    return {**group["labels"], "node.kubernetes.io/instance-type": instance_type(group), "eks.amazonaws.com/nodegroup": group["nodeGroupName"]}


def taints(group: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": taint["key"], "value": taint.get("value"), "effect": EFFECTS[taint["effect"]]} for taint in group.get("taints") or []]


def size(group: dict[str, Any]) -> int:
    return int(group["scalingConfig"]["desiredSize"])


def awaited(group: dict[str, Any], pending: list[dict[str, Any]]) -> bool:
    """Whether one of these pods wants GPUs on a node with the group's labels."""
    own = labels(group)

    def wants(pod: dict[str, Any]) -> bool:
        selector = pod["spec"].get("nodeSelector") or {}
        gpus = any(GPU in (container.get("resources", {}).get("limits") or {}) for container in pod["spec"]["containers"])
        return gpus and all(own.get(key) == value for key, value in selector.items())

    return any(wants(pod) for pod in pending)


def instance_type(group: dict[str, Any]) -> str:
    # A capacity block's stands in the launch template alone.
    return str((group.get("instanceTypes") or ["unnamed"])[0])


def devices(account: Account, group: dict[str, Any], simulation: dict[str, Any] | None = None) -> dict[str, int]:
    """How many GPUs and EFA interfaces each node of the group has. simulation: instance types that are other than the simulator's own."""
    if not group.get("taints"):
        return {}
    (template,) = [made for made in account.resources(TEMPLATE) if made["id"] == group["launchTemplate"]["id"]]
    kind = template.get("instanceType") or instance_type(group)
    known = yaml.safe_load((LAB / "aws_sim" / "awssim" / "tables.yaml").read_text())["instance_types"] | (simulation or {}).get("instance_types", {})
    interfaces = template.get("networkInterfaces") or []
    return {GPU: known[kind]["gpus"], EFA: sum(interface["interfaceType"].startswith("efa") for interface in interfaces)}
