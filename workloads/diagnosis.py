"""What Kubernetes shows of nodes and Ray pods, read as: ready, still coming, or stuck and why. Pure: the API's own JSON in, sentences out."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import config
from workloads import manifests

GPU, EFA = "nvidia.com/gpu", "vpc.amazonaws.com/efa"

# Seconds for which a cause may last before it counts: some mend themselves.
AT_ONCE = 10.0  # long enough for the kubelet to try twice
PLACED = 60.0  # the scheduler's answer, once no old pod is in the way
NEW_NODE = 900.0  # a node that an autoscaler buys
REGISTRY = 90.0  # a registry that does not answer
THROTTLED = 900.0  # one that says: later
NO_PODS = RUNS_AGAIN = 60.0
# What ended later than this after its start may only have found the machine too busy, as Ray does; Kubernetes starts it again.
LATE, BUSY = 30.0, 300.0
NODES, PLUGIN, DEVICES = 300.0, 60.0, 120.0

IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable")
CONTAINER_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CreatePodSandboxError")
# What registries and containerd say of an image that will not come later either.
NO_SUCH_IMAGE = tuple("not found|manifest unknown|denied|unauthorized|authorization failed|no match for platform|does not exist|invalid reference".split("|"))
SLOW_DOWN = ("toomanyrequests", "too many requests", "429")


@dataclasses.dataclass(frozen=True)
class Cause:
    """Something that is wrong. key: the same for the same cause at a later look. patience: seconds it may last. log_of: (pod, container) that crashed."""

    key: str
    text: str
    patience: float
    log_of: tuple[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Moment:
    """One look. text: one line for a person, of what is ready or still to come. causes: what keeps it, the gravest first."""

    ready: bool
    text: str
    causes: tuple[Cause, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Devices:
    """What the GPU nodes must show. nodes: how many there are at least, 0 with an autoscaler that may have none. gpus, efa: on each."""

    nodes: int
    gpus: int
    efa: int


def _status(thing: Mapping[str, Any]) -> Mapping[str, Any]:
    found = thing.get("status")
    return found if isinstance(found, Mapping) else {}


def _condition(thing: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((c for c in _status(thing).get("conditions") or [] if c.get("type") == kind), {})


def _name(thing: Mapping[str, Any]) -> str:
    return str(thing.get("metadata", {}).get("name", "?"))


def is_ready(thing: Mapping[str, Any]) -> bool:
    return _condition(thing, "Ready").get("status") == "True"


def going(thing: Mapping[str, Any]) -> bool:
    return bool(thing.get("metadata", {}).get("deletionTimestamp"))


def _containers(pod: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    status = _status(pod)
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _asked(pod: Mapping[str, Any]) -> str:
    """``cpu 2, memory 8Gi, nvidia.com/gpu 4`` of the pod's first container, which is Ray's."""
    containers = pod.get("spec", {}).get("containers") or [{}]
    requests = containers[0].get("resources", {}).get("requests") or {}
    return ", ".join(f"{name} {amount}" for name, amount in sorted(requests.items()) if name != "ephemeral-storage") or "nothing"


def pod_cause(pod: Mapping[str, Any], way_out: str, placed: float = PLACED) -> Cause | None:
    """What keeps a pod from being ready, where that is more than time. way_out: what a person can change where it finds no place."""
    name, status = _name(pod), _status(pod)
    if status.get("phase") == "Failed":
        return Cause(f"{name} failed", f"pod {name} failed: {status.get('reason', 'no reason given')}. {status.get('message', '')}".strip(), AT_ONCE)
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        why = str(scheduled.get("message", scheduled.get("reason", ""))).rstrip(". ")
        return Cause(f"{name} unplaced", f"pod {name} finds no node (it asks for {_asked(pod)}): {why}. {way_out}", placed)
    for container in _containers(pod):
        found = _container_cause(name, container)
        if found:
            return found
    return None


def _container_cause(pod: str, container: Mapping[str, Any]) -> Cause | None:
    inner, state = str(container.get("name")), container.get("state") or {}
    waiting = state.get("waiting") or {}
    reason, message = str(waiting.get("reason", "")), str(waiting.get("message", "")).strip()
    where = f"pod {pod}, container {inner}"
    if reason in IMAGE_REASONS:
        said = message.lower()
        if any(word in said for word in SLOW_DOWN):
            text = "the registry throttles; it goes on by itself, or use a mirror of your own (ray.image)"
            return Cause(f"{pod} image", f"{where}: {reason}: {message}. {text}", THROTTLED)
        final = reason in ("InvalidImageName", "ErrImageNeverPull") or any(word in said for word in NO_SUCH_IMAGE)
        text = f"Check the name and that the nodes may pull it (ray.image): {container.get('image')}"
        return Cause(f"{pod} image", f"{where}: {reason}: {message}. {text}", AT_ONCE if final else REGISTRY)
    if reason in CONTAINER_REASONS:
        return Cause(f"{pod} {inner} {reason}", f"{where}: {reason}: {message}", AT_ONCE)
    ended = (state.get("terminated") or {}) if reason == "" else {}
    ended = ended or (container.get("lastState") or {}).get("terminated") or {}
    if ended.get("reason") == "OOMKilled" and not container.get("ready"):
        key = "headMemory" if "head" in inner else "workerMemory, or a node with more of it"
        return Cause(f"{pod} {inner} memory", f"{where}: killed for lack of memory (OOMKilled); give it more (ray.{key})", AT_ONCE)
    if (reason == "CrashLoopBackOff" or int(container.get("restartCount") or 0) >= 2) and not container.get("ready") and ended:
        said = f"exit code {ended.get('exitCode', '?')}, {ended.get('reason', 'no reason given')} {ended.get('message') or ''}".strip()
        # One that runs again just now may be on its way up after something else went.
        patience = BUSY if _ran(ended) > LATE else AT_ONCE if reason == "CrashLoopBackOff" else RUNS_AGAIN
        return Cause(f"{pod} {inner} crash", f"{where}: ended again and again ({said})", patience, log_of=(pod, inner))
    return None


def _ran(ended: Mapping[str, Any]) -> float:
    """Seconds from a container's start to its end; 0 where Kubernetes does not say."""
    times = [ended.get(key) for key in ("startedAt", "finishedAt")]
    if not all(times):
        return 0.0
    began, over = (datetime.datetime.fromisoformat(str(at).replace("Z", "+00:00")) for at in times)
    return (over - began).total_seconds()


def _stage(pod: Mapping[str, Any]) -> str:
    """What a pod that is not ready is doing."""
    if is_ready(pod):
        return "ready"
    if _condition(pod, "PodScheduled").get("status") != "True":
        return "waits for a node"
    for container in _containers(pod):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in IMAGE_REASONS:
            return "can't pull its image"
    containers = _containers(pod)
    if not containers or all("running" not in (c.get("state") or {}) for c in containers):
        return "is being set up (image pull included)"
    return "starts"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayPods:
    """What a Ray cluster must become. made_from: manifests.MADE_FROM of its pods. workers: ready ones, at least. way_out: where a pod finds no place."""

    made_from: str
    workers: int
    autoscaled: bool
    way_out: str


def ray_cluster(cluster: Mapping[str, Any] | None, pods: Sequence[Mapping[str, Any]], operators: Sequence[Mapping[str, Any]], want: RayPods) -> Moment:
    """Whether the Ray cluster is what its document says now: head and workers ready, made from this document.

    cluster: the RayCluster, None where there is none. pods: those with its label ray.io/cluster. operators: the operator's pods.
    ``.status.state`` alone is not enough: it keeps saying ready after a change until the operator has seen it, and between the old pods'
    end and the new ones' start.
    """
    if cluster is None:
        gone = Cause("no cluster", "the RayCluster is gone; if it was deleted by hand: pulumi refresh, then pulumi up", AT_ONCE)
        return Moment(False, "there is no RayCluster", (gone,))
    status = _status(cluster)
    if status.get("observedGeneration") != cluster.get("metadata", {}).get("generation"):
        return _unseen(operators, want)
    here = [pod for pod in pods if not going(pod)]
    old_ones = len(pods) - len(here)
    heads = [pod for pod in here if pod.get("metadata", {}).get("labels", {}).get("ray.io/node-type") == "head"]
    others = [pod for pod in here if pod not in heads]
    ready_workers = sum(map(is_ready, others))
    stages = sorted({_stage(pod) for pod in others if not is_ready(pod)})
    text = f"head {_stage(heads[0]) if heads else 'not there yet'}; {ready_workers} of {want.workers} workers ready"
    text += f" ({', '.join(stages)})" if stages else ""
    text += f"; {old_ones} old pods still stopping" if old_ones else ""

    causes: list[Cause] = []
    for pod in here:
        # An old pod that stops still holds what the new one waits for.
        placed = NEW_NODE if want.autoscaled and pod not in heads else PLACED
        found = None if is_ready(pod) else pod_cause(pod, want.way_out, placed)
        if found and not (found.key.endswith(" unplaced") and old_ones):
            causes.append(found)
    failure = _condition(cluster, "ReplicaFailure")
    if failure.get("status") == "True":
        causes.append(Cause("operator refused", f"the operator can't make pods: {failure.get('reason', '')}: {failure.get('message', '')}", AT_ONCE))
    elif (not heads or len(others) < want.workers) and not old_ones:
        causes.append(Cause("no pods", f"the operator has made {len(heads)} head and {len(others)} of {want.workers} worker pods, and no more", NO_PODS))
    stale = _stale(here, want.made_from)
    if stale:
        causes.append(stale)
    ready = bool(heads) and all(map(is_ready, heads)) and ready_workers >= want.workers and stale is None and status.get("state") == "ready"
    return Moment(ready, text, tuple(causes))


def _unseen(operators: Sequence[Mapping[str, Any]], want: RayPods) -> Moment:
    waiting = [pod for pod in operators if not is_ready(pod) and not going(pod)]
    causes = [found for pod in waiting if (found := pod_cause(pod, want.way_out))]
    text = f"the operator {_stage(waiting[0])}" if waiting else "the operator has not seen the cluster yet"
    if not waiting:
        causes.append(Cause("operator", "the operator does not answer to the RayCluster; kubectl logs of its Deployment (<stack>-kuberay) says more", NO_PODS))
    return Moment(False, text, tuple(causes))


def _stale(pods: Iterable[Mapping[str, Any]], made_from: str) -> Cause | None:
    """A pod from before a change that the operator let stand: it compares the head alone, and not at all after an update of itself."""
    for pod in pods:
        if pod.get("metadata", {}).get("annotations", {}).get(manifests.MADE_FROM) != made_from:
            text = f"pod {_name(pod)} is from before the change, and the operator lets it stand; kubectl delete it, then pulumi up"
            return Cause("stale", text, NO_PODS)
    return None


def devices(nodes: Sequence[Mapping[str, Any]], daemons: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]], want: Devices) -> Moment:
    """Whether every GPU node shows all its devices to Kubernetes.

    nodes: all of the cluster. daemons, pods: the DaemonSets and pods of kube-system. A plugin that finds no node wants no pod and reports no
    error, so the numbers on the nodes are all that counts.
    """
    ours = [node for node in nodes if node.get("metadata", {}).get("labels", {}).get(config.ROLE_LABEL) == "gpu" and not going(node)]
    up = [node for node in ours if is_ready(node)]
    wanted = {name: count for name, count in ((GPU, want.gpus), (EFA, want.efa)) if count}
    each = ", ".join(f"{count} {name}" for name, count in wanted.items())
    if want.nodes == 0 and not ours:
        return Moment(True, f"no GPU node yet (gpu.minNodes is 0): that each shows {each} is unproven until one comes")
    causes: list[Cause] = []
    if len(up) < want.nodes:
        names = ", ".join(f"{_name(node)} ({_condition(node, 'Ready').get('message', 'no word from it')})" for node in ours if node not in up)
        why = f"not ready: {names}" if names else "the node group has not brought more; look at its health in the EKS console"
        causes.append(Cause("nodes", f"{len(up)} of {want.nodes} GPU nodes are ready ({why})", NODES))
    complete = 0
    for node in up:
        shown = {name: _count(_status(node).get("allocatable", {}).get(name)) for name in wanted}
        lacking = [name for name in wanted if shown[name] != wanted[name]]
        complete += not lacking
        causes += [_lacking(node, name, shown[name], wanted[name], daemons, pods) for name in lacking]
    ready = len(up) >= max(want.nodes, 1) and complete == len(up)
    return Moment(ready, f"{complete} of {max(want.nodes, len(ours))} GPU nodes show {each}", tuple(causes))


def unknown_fields(schema: Mapping[str, Any], value: Any, path: str = "spec") -> list[str]:
    """Fields of ``value`` that the API server would drop without a word, for the CRD's openAPIV3Schema does not know them."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    if isinstance(value, Mapping):
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        found: list[str] = []
        for key, inner in value.items():
            if key in known:
                found += unknown_fields(known[key], inner, f"{path}.{key}")
            elif not others:
                found.append(f"{path}.{key}")
        return found
    if isinstance(value, list):
        return [field for inner in value for field in unknown_fields(schema.get("items", {}), inner, f"{path}[]")]
    return []


def crd(found: Mapping[str, Any] | None, kind: str, spec: Mapping[str, Any], update: str) -> Moment:
    """Whether the cluster's definition of a kind knows all that the document says. Helm makes CRDs where there are none, and never updates them.

    found: the CustomResourceDefinition, None where there is none. update: the command that updates it.
    """
    if found is None:
        return Moment(False, f"the cluster does not know {kind} yet", (Cause("no crd", f"the cluster has no {kind}; make it: {update}", NO_PODS),))
    versions = [version for version in found.get("spec", {}).get("versions") or [] if version.get("name") == "v1"]
    schema = versions[0].get("schema", {}).get("openAPIV3Schema", {}).get("properties", {}).get("spec", {}) if versions else {}
    dropped = sorted(set(unknown_fields(schema, spec)))
    if not dropped:
        return Moment(True, f"{kind} is new enough")
    shown = ", ".join(dropped[:3]) + (f" and {len(dropped) - 3} more" if len(dropped) > 3 else "")
    text = f"{kind} in this cluster is older than the operator's chart and would drop {shown}; update it, for Helm never does: {update}"
    return Moment(False, "", (Cause("old crd", text, 0),))


def one_node(nodes: Sequence[Mapping[str, Any]]) -> Moment:
    """Whether there is one node that takes pods, so that a folder of it is the same for all of them."""
    open_ = [node for node in nodes if not node.get("spec", {}).get("unschedulable") and not _shut(node) and not going(node)]
    if len(open_) <= 1:
        return Moment(True, "one node takes pods")
    names = ", ".join(sorted(map(_name, open_)))
    text = (
        f"{config.PROJECT}:storage.hostPath is a folder of one node, and {len(open_)} nodes take pods ({names}): a worker elsewhere would write"
        " where nobody looks; use storage.claimGiB (a ReadWriteMany volume) or storage.endpoint (S3-compatible)"
    )
    return Moment(False, "", (Cause("nodes", text, 0),))


def _shut(node: Mapping[str, Any]) -> bool:
    return any(taint.get("effect") in ("NoSchedule", "NoExecute") for taint in node.get("spec", {}).get("taints") or [])


def _count(quantity: Any) -> int:
    return int(quantity) if str(quantity).isdigit() else 0


PLUGINS = {GPU: "nvidia-device-plugin", EFA: "aws-efa-k8s-device-plugin"}


def _lacking(node: Mapping[str, Any], name: str, shown: int, wanted: int, daemons: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]]) -> Cause:
    """The likely cause, from the nearest to the plugin to the nearest to the hardware."""
    plugin, place = PLUGINS[name], _name(node)
    labels = node.get("metadata", {}).get("labels", {})
    begin = f"node {place} ({labels.get('node.kubernetes.io/instance-type', 'type unknown')}) shows {shown} of {wanted} {name}"
    daemon = next((d for d in daemons if _name(d).startswith(plugin)), None)
    if daemon is None:
        return Cause(f"{name} no plugin", f"{begin}: there is no DaemonSet {plugin} in kube-system", PLUGIN)
    if not _status(daemon).get("desiredNumberScheduled"):
        chooses = "node labels and instance types that its chart selects, and taints that it tolerates"
        return Cause(f"{name} no pods", f"{begin}: DaemonSet {_name(daemon)} wants 0 pods, for no node fits it; compare {chooses}, with the node's", PLUGIN)
    selector = daemon.get("spec", {}).get("selector", {}).get("matchLabels", {})
    of_it = [p for p in pods if selector and selector.items() <= p.get("metadata", {}).get("labels", {}).items()]
    here = [p for p in of_it if p.get("spec", {}).get("nodeName") == place]
    for pod in [p for p in here if not is_ready(p)]:
        found = pod_cause(pod, "")
        if found:
            return dataclasses.replace(found, text=f"{begin}: {found.text}", key=f"{name} {found.key}")
    if not here:
        return Cause(f"{name} {place} unfit", f"{begin}: DaemonSet {_name(daemon)} has no pod there; compare its node selection with the node's labels", PLUGIN)
    hardware = {
        GPU: "the NVIDIA driver of the node's AMI found no more (kubectl -n kube-system logs ds/{0}), or the instance has fewer GPUs than EC2 says",
        EFA: "the node was launched without all EFA interfaces of the launch template, or lacks the driver (kubectl -n kube-system logs ds/{0})",
    }[name].format(_name(daemon))
    return Cause(f"{name} {place} devices", f"{begin}, though the plugin's pod is there: {hardware}", DEVICES)
