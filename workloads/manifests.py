"""The Ray cluster and the network around it, as plain Kubernetes documents."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import config
import versions
from workloads import charts, storage

GCS, DASHBOARD, CLIENT = 6379, 8265, 10001
SUBMITTER = {"app.kubernetes.io/component": "ray-job-submitter"}
TOKEN_SECRET, TOKEN_KEY = "hugging-face", "token"
# What the kubelet and the node's own daemons (CNI, kube-proxy, Pod Identity agent, device plugins) take besides what EC2 reports.
DAEMON_CPUS, DAEMON_GIB = 2, 2
# A worker pod that is stopped: at most so long for the command that tells Ray, then so long for the run to write a checkpoint and go elsewhere,
# then 5 s for Ray's own processes to end.
TELL_SECONDS, LEAVE_SECONDS = 20, 35
STOP_SECONDS = TELL_SECONDS + LEAVE_SECONDS + 5
# A resource of Ray that only the pods for preparing data have. A task that asks for it never makes a GPU node start.
PREPARE_RESOURCE = "prepare"
# Ray's own autoscaler, a container beside the head; KubeRay's default asks for half a CPU.
AUTOSCALER = {
    "version": "v2",
    "idleTimeoutSeconds": charts.RAY_IDLE_SECONDS,
    "imagePullPolicy": "IfNotPresent",
    "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
}
MADE_FROM = "ray-train-efa/made-from"


def digest(value: Any) -> str:
    """Twelve characters that are others for another value (plain data; the order of keys does not count)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workers:
    """One worker pod's share, and how many pods. cpu: CPUs (fractions allowed). memory: a Kubernetes quantity. gpus, efa: devices."""

    least: int
    most: int
    cpu: float
    memory: str
    gpus: int = 0
    efa: int = 0

    @property
    def ranks(self) -> int:
        """Training processes when every pod is there: one a GPU, else one a pod."""
        return self.most * max(1, self.gpus)

    @property
    def fewest_ranks(self) -> int:
        """Training processes when only those pods are there that always are, and one at least."""
        return max(1, self.least) * max(1, self.gpus)


def whole_node(vcpus: int, allocatable_gib: float, gpus: int, efa: int, size: tuple[int, int]) -> Workers:
    """Workers that take a GPU node each: all its devices, and what the node's daemons leave of CPU and memory."""
    return Workers(
        least=size[0], most=size[1], cpu=max(1, vcpus - DAEMON_CPUS), memory=f"{max(1, math.floor(allocatable_gib - DAEMON_GIB))}Gi", gpus=gpus, efa=efa
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """What decides the RayCluster document. on_eks: system and GPU nodes exist, each with its label and taint. preparing: pods on system nodes that
    come when data is prepared and go after it, None where there is nothing to prepare or the workers do it.
    """

    name: str
    image: str
    head_cpu: int
    head_memory: str
    workers: Workers
    environment: Mapping[str, str]
    storage: storage.RunStorage
    on_eks: bool
    hub_token: bool = False
    huge_pages_mib: int | None = None
    lock_memory: bool = False
    preparing: Workers | None = None


def restricted(*capabilities: str) -> dict[str, Any]:
    """A container's rights: root in its own file system, for the image knows no other user, and nothing besides the capabilities named."""
    allowed = {"drop": ["ALL"], **({"add": list(capabilities)} if capabilities else {})}
    return {"allowPrivilegeEscalation": False, "capabilities": allowed, "seccompProfile": {"type": "RuntimeDefault"}}


def system_nodes(on_eks: bool) -> dict[str, str]:
    """The node selector of what must not take a GPU node."""
    return {config.ROLE_LABEL: "system"} if on_eks else {}


def _environment(cluster: Cluster) -> list[dict[str, Any]]:
    plain = {
        **cluster.environment,
        # Folded lines would hide a rank from whoever reads the log.
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    found: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in sorted(plain.items())]
    secret: list[tuple[str, str, str]] = []
    if cluster.hub_token:
        secret.append(("HF_TOKEN", TOKEN_SECRET, TOKEN_KEY))
    if cluster.storage.keys:
        secret += [(name, storage.KEYS_SECRET, name) for name in storage.KEYS]
    return found + [{"name": name, "valueFrom": {"secretKeyRef": {"name": owner, "key": key}}} for name, owner, key in secret]


def _volumes(cluster: Cluster) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    volumes: list[dict[str, Any]] = [{"name": "ray-tmp", "emptyDir": {}}]
    mounts: list[dict[str, Any]] = [{"name": "ray-tmp", "mountPath": "/tmp/ray"}]  # noqa: S108 - a path in the pod
    if cluster.storage.volume is not None:
        volumes.append({"name": "storage", **cluster.storage.volume})
        mounts.append({"name": "storage", "mountPath": storage.MOUNT})
    return volumes, mounts


def _near(cluster: Cluster, node_type: str) -> dict[str, Any]:
    labels = {"ray.io/cluster": cluster.name, "ray.io/node-type": node_type}
    return {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}


def _head(cluster: Cluster, autoscaled: bool) -> dict[str, Any]:
    volumes, mounts = _volumes(cluster)
    return {
        # No actor of the training lands beside the head's own processes.
        "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},  # noqa: S104 - the operator asks it; NetworkPolicy and token guard it
        "serviceType": "ClusterIP",
        "template": {
            "spec": {
                "serviceAccountName": config.TRAINING_SERVICE_ACCOUNT,
                # Only Ray's autoscaler, in the head's pod, talks to the API server.
                "automountServiceAccountToken": autoscaled,
                "nodeSelector": system_nodes(cluster.on_eks),
                "initContainers": [_version_check(cluster.image)],
                "containers": [
                    {
                        "name": "ray-head",
                        "image": cluster.image,
                        "imagePullPolicy": "IfNotPresent",
                        # Else the CUDA image's hook looks for a driver that a CPU node has not.
                        "env": [*_environment(cluster), {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}],
                        "ports": [{"name": name, "containerPort": port} for name, port in (("gcs", GCS), ("dashboard", DASHBOARD), ("client", CLIENT))],
                        "resources": {
                            "requests": {"cpu": str(cluster.head_cpu), "memory": cluster.head_memory, "ephemeral-storage": "5Gi"},
                            "limits": {"memory": cluster.head_memory},
                        },
                        "securityContext": restricted(),
                        "volumeMounts": mounts,
                    }
                ],
                "volumes": volumes,
            }
        },
    }


def _version_check(image: str) -> dict[str, Any]:
    """Runs before the head: the operator acts by the version that it is told, on probes and tokens, and the image may be of another."""
    script = (
        f"import importlib.metadata as m, sys; found = m.version('ray'); found == '{versions.RAY}' or"
        f" sys.exit(f'the image has Ray {{found}}, and this project is made for {versions.RAY}: use an image with it (ray.image)')"
    )
    return {
        "name": "ray-version",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", script],
        "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}],
        # So that the reason stands in the pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": restricted(),
    }


def _worker_spec(cluster: Cluster) -> dict[str, Any]:
    volumes, mounts = _volumes(cluster)
    workers = cluster.workers
    devices: dict[str, Any] = {name: count for name, count in (("nvidia.com/gpu", workers.gpus), ("vpc.amazonaws.com/efa", workers.efa)) if count}
    if cluster.huge_pages_mib:
        devices["hugepages-2Mi"] = f"{cluster.huge_pages_mib}Mi"
        volumes = [*volumes, {"name": "huge-pages", "emptyDir": {"medium": "HugePages-2Mi"}}]
        mounts = [*mounts, {"name": "huge-pages", "mountPath": "/dev/hugepages"}]
    affinity: dict[str, Any] = {}
    if cluster.on_eks:
        affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [_near(cluster, "worker")]}
    if cluster.storage.one_node:
        # The folder exists on one node only; a pod elsewhere would write its checkpoint where nobody looks.
        affinity["podAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [_near(cluster, "head")]}
    key, _, effect = config.GPU_TAINT
    # The raylet's own argument: without an id the command would start a driver to ask for it, which takes as long again.
    node = "$(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | sed -n 's/^--node_id=/--node-id /p' | head -1)"
    drain = f"ray drain-node {node} --reason DRAIN_NODE_REASON_PREEMPTION --reason-message 'the pod is stopped' --deadline-remaining-seconds {LEAVE_SECONDS}"
    # Ray's processes get their SIGTERM when the hook returns, so it stays as long as the node has work: a drained one without any ends by itself.
    leave = f"for i in $(seq {LEAVE_SECONDS}); do grep -qsx raylet /proc/[0-9]*/comm || break; sleep 1; done"
    return {
        "serviceAccountName": config.TRAINING_SERVICE_ACCOUNT,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "nodeSelector": {config.ROLE_LABEL: "gpu"} if cluster.on_eks else {},
        "tolerations": [{"key": key, "operator": "Exists", "effect": effect}] if cluster.on_eks else [],
        "affinity": affinity,
        "containers": [
            {
                "name": "ray-worker",
                "image": cluster.image,
                "imagePullPolicy": "IfNotPresent",
                "env": _environment(cluster),
                # `ray stop` would look like a crash to the run; a drained node is one that is known to go.
                "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", f"timeout {TELL_SECONDS} {drain} && {leave}; true"]}}},
                "resources": {
                    "requests": {"cpu": _cpus(workers.cpu), "memory": workers.memory, "ephemeral-storage": "5Gi", **devices},
                    "limits": {"memory": workers.memory, **devices},
                },
                "securityContext": restricted(*(["IPC_LOCK"] if cluster.lock_memory else [])),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _preparing(cluster: Cluster, pods: Workers) -> dict[str, Any]:
    """The group of pods that prepare data: on system nodes, none of them at rest."""
    volumes, mounts = _volumes(cluster)
    container = {
        "name": "ray-worker",
        "image": cluster.image,
        "imagePullPolicy": "IfNotPresent",
        # Else the CUDA image's hook looks for a driver that a CPU node has not.
        "env": [*_environment(cluster), {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}],
        "resources": {"requests": {"cpu": _cpus(pods.cpu), "memory": pods.memory, "ephemeral-storage": "5Gi"}, "limits": {"memory": pods.memory}},
        "securityContext": restricted(),
        "volumeMounts": mounts,
    }
    spec = {
        "serviceAccountName": config.TRAINING_SERVICE_ACCOUNT,
        "automountServiceAccountToken": False,
        "nodeSelector": system_nodes(cluster.on_eks),
        "containers": [container],
        "volumes": volumes,
    }
    cpus = str(max(1, math.ceil(pods.cpu)))
    # The operator refuses a group that says resources in both places (validateRayGroupResources), and writes them into its start parameters, which
    # must be there for that.
    return {
        "groupName": "preparing",
        "rayStartParams": {"block": "true"},
        "resources": {"CPU": cpus, PREPARE_RESOURCE: cpus},
        "template": {"spec": spec},
    }


def _cpus(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{round(number * 1000)}m"


def ray_cluster(cluster: Cluster) -> dict[str, Any]:
    """``spec`` of the RayCluster (kuberay v1.6.0, ray-operator/apis/ray/v1/raycluster_types.go)."""
    workers = cluster.workers
    autoscaled = workers.least != workers.most
    head = _head(cluster, autoscaled)
    group: dict[str, Any] = {"groupName": "workers", "rayStartParams": {"num-gpus": str(workers.gpus)}, "template": {"spec": _worker_spec(cluster)}}
    preparing = [] if cluster.preparing is None else [_preparing(cluster, cluster.preparing)]
    # The operator compares the head alone with its description; this tells of every pod which description it was made from.
    mark = {MADE_FROM: digest([head, group, *preparing])}
    for template in (head["template"], *(one["template"] for one in (group, *preparing))):
        template["metadata"] = {"annotations": mark}
    return {
        "rayVersion": versions.RAY,
        # Without it a changed image or environment is accepted and the old pods stay.
        "upgradeStrategy": {"type": "Recreate"},
        # Whoever reaches the job API runs code: the network policy keeps others out, the token those who get in all the same.
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": autoscaled,
        **({"autoscalerOptions": AUTOSCALER} if autoscaled else {}),
        "headGroupSpec": head,
        # With autoscaling the number is Ray's to write.
        "workerGroupSpecs": [
            {**group, **({} if autoscaled else {"replicas": workers.most}), "minReplicas": workers.least, "maxReplicas": workers.most},
            *({**one, "minReplicas": 0, "maxReplicas": cluster.preparing.most} for one in preparing if cluster.preparing),
        ],
    }


def network_policy(cluster: str, operator: Mapping[str, str]) -> dict[str, Any]:
    """``spec`` of the NetworkPolicy: the cluster's pods reach each other; the operator (its pod labels) and the submitter reach the job API; nobody else."""

    def of(labels: Mapping[str, str]) -> dict[str, Any]:
        return {"podSelector": {"matchLabels": dict(labels)}}

    callers: Sequence[Mapping[str, str]] = (operator, SUBMITTER)
    return {
        "podSelector": {"matchLabels": {"ray.io/cluster": cluster}},
        "policyTypes": ["Ingress"],
        "ingress": [
            # Any port: Ray and the collectives choose theirs.
            {"from": [of({"ray.io/cluster": cluster})]},
            {"from": [of(labels) for labels in callers], "ports": [{"protocol": "TCP", "port": DASHBOARD}]},
        ],
    }
