"""Why is the job not running? What Kubernetes and AWS say in, one sentence with the way out out. Pure: :mod:`ops.stack` asks, this judges.

Rules stand in the order in which things must work: operator, nodes, head, workers, submitter, job. The first that does not hold is the cause;
what comes later only waits for it.
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ops.output import duration

Object = Mapping[str, Any]

# An image of the 10 GB class takes minutes; a node that takes longer than this to join never will.
SLOW_PULL_SECONDS = 900
SLOW_NODE_SECONDS = 600
DEVICES = {"nvidia.com/gpu": "GPU", "vpc.amazonaws.com/efa": "EFA interface"}
PULL_FAILED = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")


@dataclasses.dataclass(frozen=True)
class Why:
    """``cause``: a word for programs. ``sentence``: what is the matter. ``do``: the way out. ``waiting``: it is on its way, nothing is wrong (yet)."""

    cause: str
    sentence: str
    do: str = ""
    where: str = ""
    waiting: bool = False
    running: bool = False


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was asked, as the APIs answer it. ``groups``: EKS node groups; ``activities``: scaling activities, newest first. ``now``: aware."""

    now: datetime.datetime
    job: Object | None
    cluster: Object | None
    pods: Sequence[Object] = ()
    operator: Sequence[Object] = ()
    operator_wanted: int | None = None
    events: Sequence[Object] = ()
    nodes: Sequence[Object] = ()
    groups: Sequence[Object] = ()
    activities: Sequence[Object] = ()
    daemons: Sequence[Object] = ()
    ray_state: str | None = None
    ray_message: str = ""
    last_line: str = ""


def explain(facts: Facts) -> Why:
    """The first thing that stands in the job's way."""
    job = (facts.job or {}).get("status") or {}
    state = facts.ray_state or job.get("jobStatus") or ""
    if state in ("SUCCEEDED", "STOPPED", "FAILED"):
        return _ended(state, facts.ray_message or str(job.get("message") or ""))
    ready = _ready(facts.pods, "worker") and _ready(facts.pods, "head")
    if state == "RUNNING" and ready:
        said = f"; its last word: {facts.last_line}" if facts.last_line else ""
        return Why("running", f"the job is running{said}", running=True)
    for rule in (_operator, _groups, _pods, _cluster, _submitter):
        if found := rule(facts):
            return found
    return _job(facts, state)


def _ended(state: str, message: str) -> Why:
    last = _last_line(message)
    if state == "SUCCEEDED":
        return Why("done", "the job has ended well", running=True)
    if state == "STOPPED":
        return Why("stopped", "the job was stopped on request", "`python -m ops train STACK` goes on from its last checkpoint")
    return Why("failed", f"the job has failed: {last}" if last else "the job has failed", "`python -m ops logs STACK` shows what it said")


def _operator(facts: Facts) -> Why | None:
    if any(_is_ready(pod) for pod in facts.operator):
        return None
    do = "look at it with: kubectl -n NAMESPACE describe pods -l app.kubernetes.io/name=kuberay-operator; `python -m ops up STACK` puts it back"
    if facts.operator_wanted == 0:
        return Why(
            "operator",
            "the KubeRay operator is scaled to zero, and nobody else starts Ray's pods and jobs",
            "`kubectl -n NAMESPACE scale --replicas=1 deployment/OPERATOR`",
        )
    if not facts.operator:
        return Why("operator", "the KubeRay operator has no pod, and nobody else starts Ray's pods and jobs", do)
    inner = _pod(facts.operator[0], facts)
    return Why(
        "operator",
        f"the KubeRay operator is not running: {inner.sentence}" if inner else "the KubeRay operator is not ready",
        inner.do if inner and inner.do else do,
    )


def _groups(facts: Facts) -> Why | None:
    """EKS: a group that has fewer nodes than it wants, and what the Auto Scaling group says about it."""
    for group in facts.groups:
        name = str(group.get("nodegroupName", "?"))
        wanted = int((group.get("scalingConfig") or {}).get("desiredSize") or 0)
        there = [node for node in facts.nodes if _labels(node).get("eks.amazonaws.com/nodegroup") == name]
        up = [node for node in there if _condition(node, "Ready").get("status") == "True"]
        issues = (group.get("health") or {}).get("issues") or []
        if len(up) >= wanted and not issues and not (wanted == 0 and _label_of_group(group) == "gpu"):
            continue
        count = f"{len(up)} of {wanted} nodes of {name}"
        failed = next(
            (a for a in facts.activities if a.get("AutoScalingGroupName", "") in _asgs(group) and a.get("StatusCode") in ("Failed", "Cancelled")), None
        )
        if failed and len(there) < wanted:
            return _capacity(count, str(failed.get("StatusMessage") or ""))
        if issues:
            return Why(
                "node-group",
                f"{count} are there: {issues[0].get('code')}: {_one_line(issues[0].get('message'))}",
                "`python -m ops doctor STACK` checks the account; then `python -m ops up STACK`",
                name,
            )
        if wanted == 0:
            tainted = any(taint.get("key") == "ray-train-efa/stopped" for taint in group.get("taints") or [])
            return Why(
                "stopped",
                f"{name} has been set to zero nodes" + (" by the auto-stop (budget.stopAfter)" if tainted else " (auto-stop, or by hand)"),
                "set another budget.stopAfter and run `python -m ops up STACK --refresh`",
                name,
            )
        age = min((_age(node["metadata"].get("creationTimestamp"), facts.now) or 0.0 for node in there), default=0.0)
        if len(there) < wanted:
            waited = _age(group.get("modifiedAt") or group.get("createdAt"), facts.now)
            slow = waited is not None and waited > SLOW_NODE_SECONDS
            return Why(
                "node-not-joined",
                f"{count} have joined the cluster"
                + (f" after {duration(waited)}" if waited is not None else "")
                + ("; the rest should be here by now" if slow else ""),
                "check the instances' system log in the EC2 console and the subnet's way out (NAT)" if slow else "wait; a GPU node takes 3 to 5 minutes",
                name,
                waiting=not slow,
            )
        return Why(
            "node-not-ready",
            f"{count} are ready: {_not_ready(there)}",
            "wait; if it stays, terminate the instance and the group makes another",
            name,
            waiting=age < 300,
        )
    return None


def _capacity(count: str, message: str) -> Why:
    text = _one_line(message)
    if "VcpuLimitExceeded" in text or ("vCPU" in text and "limit" in text):
        return Why(
            "quota",
            f"{count} exist: the account's vCPU quota is too small ({text})",
            "lower gpu.nodes, or ask for more: `python -m ops doctor STACK` prints the command",
        )
    if re.search(r"InsufficientInstanceCapacity|sufficient .* capacity|UnfulfillableCapacity", text):
        return Why(
            "capacity", f"{count} exist: EC2 has no capacity ({text})", "another zone (network.zone), gpu.placementGroup: false, reserved capacity, or later"
        )
    return Why("scaling", f"{count} exist: {text}", "`python -m ops doctor STACK` checks the account")


def _pods(facts: Facts) -> Why | None:
    pods = [pod for pod in facts.pods if _kind(pod) in ("head", "worker")]
    pods.sort(key=lambda pod: (_kind(pod) != "head", pod["metadata"]["name"]))
    found = [why for pod in pods if not _is_ready(pod) and (why := _pod(pod, facts))]
    # What will never come counts before what only takes time.
    return next((why for why in found if not why.waiting), found[0] if found else None)


def _pod(pod: Object, facts: Facts) -> Why | None:
    name = str(pod["metadata"]["name"])
    status = pod.get("status") or {}
    who = {"head": "the Ray head", "worker": "a Ray worker", "submitter": "the job's submitter", "operator": "the operator"}[_kind(pod)]
    if pod["metadata"].get("deletionTimestamp"):
        return Why("terminating", f"{who} ({name}) is being stopped", "wait; it gets a minute to end", name, waiting=True)
    scheduled = _condition(pod, "PodScheduled")
    if status.get("phase") == "Pending" and scheduled.get("status") == "False":
        return _unschedulable(pod, who, str(scheduled.get("message") or ""), facts)
    waited = _age(status.get("startTime") or pod["metadata"].get("creationTimestamp"), facts.now) or 0
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, message = str(waiting.get("reason") or ""), _one_line(waiting.get("message"))
        if reason in PULL_FAILED:
            return _image(pod, container, who, facts, message)
        # An init container that did its work has ended, too.
        ended = (container.get("state") or {}).get("terminated") or {}
        if reason == "CrashLoopBackOff" or ended.get("exitCode"):
            return _crashed(container, who, name)
        if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
            return Why(
                "container", f"{who} ({name}) can't start its container: {message}", "mend what it names; `python -m ops up STACK` makes missing Secrets", name
            )
    mount = _event(facts, name, ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedCreatePodContainer"))
    pulling = _event(facts, name, ("Pulling",))
    if status.get("phase") == "Pending" and mount and (not pulling or _time(mount) >= _time(pulling)):
        return Why(
            "volume" if "Mount" in str(mount.get("reason")) or "Attach" in str(mount.get("reason")) else "sandbox",
            f"{who} ({name}) can't start: {_one_line(mount.get('message'))}",
            "mend what it names; Kubernetes tries again by itself",
            name,
        )
    if status.get("phase") == "Pending" and pulling and not _event(facts, name, ("Pulled",)):
        since = _age(pulling.get("lastTimestamp") or pulling.get("eventTime") or pulling.get("firstTimestamp"), facts.now) or 0
        image = str((pod.get("spec") or {}).get("containers", [{}])[0].get("image", "?"))
        slow = since > SLOW_PULL_SECONDS
        return Why(
            "pulling",
            f"{who} ({name}) is pulling its image {image} since {duration(since)}",
            "a registry nearer to the nodes (ray.image) would be faster" if slow else "wait; 10 GB take 5 to 10 minutes on a new node",
            name,
            waiting=not slow,
        )
    if status.get("phase") in ("Pending", "Running"):
        return Why(
            "starting",
            f"{who} ({name}) is starting since {duration(waited)}",
            "wait" if waited < 180 else f"kubectl -n NAMESPACE describe pod {name}",
            name,
            waiting=waited < 180,
        )
    return Why(
        "pod",
        f"{who} ({name}) is {status.get('phase')}: {_one_line(status.get('message') or status.get('reason'))}",
        f"kubectl -n NAMESPACE describe pod {name}",
        name,
    )


def _image(pod: Object, container: Object, who: str, facts: Facts, message: str) -> Why:
    name, image = str(pod["metadata"]["name"]), str(container.get("image") or "?")
    # The waiting state only says "Back-off"; the registry's answer is in the events.
    failed = _event(facts, name, ("Failed",), containing="image")
    said = _one_line((failed or {}).get("message")) or message
    if re.search(r"not found|manifest unknown|does not exist|no such host|NotFound|repository", said):
        reason = "the image does not exist there, or its registry can't be reached"
    elif re.search(r"unauthorized|denied|403|401|authentication", said, re.IGNORECASE):
        reason = "the registry refuses the nodes"
    elif re.search(r"toomanyrequests|429", said, re.IGNORECASE):
        reason = "the registry is asked too often"
    elif "no space left" in said:
        reason = "the node's disk is full"
    else:
        reason = "the pull fails"
    return Why(
        "image",
        f"{who} ({name}) can't get its image {image}: {reason} ({said[:160]})",
        "name an image that the nodes can pull (ray.image, or pins.imageDigest), then `python -m ops up STACK`",
        name,
    )


def _crashed(container: Object, who: str, name: str) -> Why:
    ended = (container.get("lastState") or {}).get("terminated") or (container.get("state") or {}).get("terminated") or {}
    if ended.get("reason") == "OOMKilled":
        return Why(
            "memory",
            f"{who} ({name}) was killed for lack of memory, {container.get('restartCount', 0)} times",
            "raise ray.headMemory or ray.workerMemory",
            name,
        )
    said = _last_line(str(ended.get("message") or ""))
    return Why(
        "crash",
        f"{who} ({name}) ends again and again with code {ended.get('exitCode', '?')}" + (f": {said}" if said else ""),
        f"kubectl -n NAMESPACE logs {name} --previous",
        name,
    )


def _unschedulable(pod: Object, who: str, message: str, facts: Facts) -> Why:
    """kube-scheduler's "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint {a: b}. preemption: ..."."""
    name = str(pod["metadata"]["name"])
    text = message.split("preemption:")[0].strip()
    requests = _requests(pod)
    for device, title in DEVICES.items():
        if f"Insufficient {device}" in text and requests.get(device):
            return _device(pod, who, device, title, requests[device], facts)
    if match := re.search(r"Insufficient (cpu|memory|ephemeral-storage)", text):
        what = match[1]
        most = max((_quantity(_allocatable(node).get(what, "0")) for node in facts.nodes), default=0.0)
        asked = _quantity(requests.get(what, "0"))
        if asked > most:
            shown = f"{_shown(what, asked)}, and the biggest node has {_shown(what, most)}"
            do = {"cpu": "lower ray.workerCpu or ray.headCpu", "memory": "lower ray.workerMemory or ray.headMemory"}.get(what, "give the nodes bigger disks")
            return Why(
                "unsatisfiable", f"{who} ({name}) asks for {shown}: no node can ever hold it", f"{do}, or use bigger nodes; then `python -m ops up STACK`", name
            )
        return Why(
            "full",
            f"{who} ({name}) asks for {_shown(what, asked)}, which other pods hold now",
            "wait for them, remove them, or lower the request",
            name,
            waiting=True,
        )
    if "untolerated taint" in text:
        return _tainted(pod, who, text, facts)
    if re.search(r"didn't match Pod's node affinity/selector|node selector", text):
        selector = ", ".join(f"{key}={value}" for key, value in ((pod.get("spec") or {}).get("nodeSelector") or {}).items())
        return Why(
            "selector",
            f"{who} ({name}) finds no node with the label {selector or 'that it asks for'}",
            "the nodes are not there (yet): `python -m ops up STACK --refresh`",
            name,
        )
    if "no nodes available" in text or "0/0 nodes" in text:
        return Why("no-nodes", f"{who} ({name}) finds no node at all", "`python -m ops up STACK` makes them", name)
    if "unbound" in text or "volume" in text.lower():
        return Why("volume", f"{who} ({name}) waits for its volume: {_one_line(text)}", "see that storage.storageClass exists and offers ReadWriteMany", name)
    return Why("unschedulable", f"{who} ({name}) finds no node: {_one_line(text)}", "kubectl describe nodes shows what they have", name)


def _tainted(pod: Object, who: str, text: str, facts: Facts) -> Why:
    """Older schedulers name the taint, 1.34 only says that there is one; the nodes that the pod selects tell."""
    name, spec = str(pod["metadata"]["name"]), pod.get("spec") or {}
    selector = spec.get("nodeSelector") or {}
    selected = [node for node in facts.nodes if selector.items() <= _labels(node).items()]
    taints = [(node["metadata"]["name"], taint) for node in selected for taint in _untolerated(spec, node)]
    told = re.search(r"untolerated taint\(?s?\)? ?\{([^}]*)\}", text)
    own = [(node, taint) for node, taint in taints if not str(taint.get("key")).startswith("node.kubernetes.io/")]
    if not own and taints and not told:
        node, taint = taints[0]
        what = str(taint["key"]).removeprefix("node.kubernetes.io/")
        return Why("node-not-ready", f"{who} ({name}) waits for node {node}, which is {what}", "wait; if it stays: kubectl describe nodes", name, waiting=True)
    node, shown = "NODE", told[1].replace(": ", "=") if told else "?"
    if own:
        node, taint = own[0]
        shown = f"{taint.get('key')}={taint.get('value') or ''}"
    shown = shown.rstrip("=")
    return Why(
        "taint",
        f"{who} ({name}) finds no node: {'node ' + node + ' carries' if own else 'they carry'} the taint {shown}, which it does not tolerate",
        f"take the taint off (kubectl taint nodes {node} {shown.split('=')[0]}-), or use other nodes",
        name,
    )


def _untolerated(spec: Object, node: Object) -> list[Mapping[str, Any]]:
    """https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/"""

    def tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
        key, effect = toleration.get("key"), toleration.get("effect")
        same = toleration.get("operator") == "Exists" or toleration.get("value", "") == taint.get("value", "")
        return (not key or key == taint.get("key")) and (not effect or effect == taint.get("effect")) and same

    taints = [taint for taint in (node.get("spec") or {}).get("taints") or [] if taint.get("effect") in ("NoSchedule", "NoExecute")]
    return [taint for taint in taints if not any(tolerates(toleration, taint) for toleration in spec.get("tolerations") or [])]


def _device(pod: Object, who: str, device: str, title: str, asked: str, facts: Facts) -> Why:
    name = str(pod["metadata"]["name"])
    most = max((int(_quantity(_allocatable(node).get(device, "0"))) for node in facts.nodes), default=0)
    plural = "s" if asked != "1" else ""
    if most == 0:
        daemon = next(
            (found for found in facts.daemons if ("efa" in found["metadata"]["name"]) == ("efa" in device) and "plugin" in found["metadata"]["name"]), None
        )
        wanted = (daemon or {}).get("status", {}).get("desiredNumberScheduled", 0)
        told = (
            "its device plugin is not installed"
            if daemon is None
            else "its device plugin wants no pod on any node"
            if not wanted
            else "its device plugin has registered none"
        )
        return Why(
            f"device-{'efa' if 'efa' in device else 'gpu'}",
            f"{who} ({name}) asks for {asked} {title}{plural}, and no node offers any: {told}",
            "look at the plugin: kubectl -n kube-system get daemonsets,pods; `python -m ops up STACK --refresh` puts it back",
            name,
        )
    if int(_quantity(asked)) > most:
        return Why(
            f"device-{'efa' if 'efa' in device else 'gpu'}",
            f"{who} ({name}) asks for {asked} {title}{plural}, and the best node has {most}",
            "use another gpu.instanceType",
            name,
        )
    return Why("full", f"{who} ({name}) asks for {asked} {title}{plural}, which other pods hold now", "wait for them, or remove them", name, waiting=True)


def _cluster(facts: Facts) -> Why | None:
    if facts.cluster is None:
        return Why("no-cluster", "the Ray cluster does not exist", "`python -m ops up STACK` makes it")
    status = facts.cluster.get("status") or {}
    wanted, there = status.get("desiredWorkerReplicas"), len([pod for pod in facts.pods if _kind(pod) == "worker"])
    failed = next(
        (
            event
            for event in reversed(_sorted(facts.events))
            if (event.get("involvedObject") or {}).get("kind") == "RayCluster" and event.get("type") == "Warning"
        ),
        None,
    )
    if not _ready(facts.pods, "head") or (wanted and there < wanted):
        if failed:
            return Why(
                "pods-refused",
                f"the operator can't make Ray's pods: {_one_line(failed.get('message'))}",
                "mend what it names (a quota or an admission policy of the cluster)",
            )
        missing = "the head" if not [pod for pod in facts.pods if _kind(pod) == "head"] else f"{(wanted or 0) - there} of {wanted} workers"
        return Why("no-pods", f"Ray's pods are not there yet: {missing}", "wait; the operator makes them within seconds", waiting=True)
    return None


def _submitter(facts: Facts) -> Why | None:
    for pod in facts.pods:
        if _kind(pod) == "submitter" and (pod.get("status") or {}).get("phase") == "Pending":
            return _pod(pod, facts)
    return None


def _job(facts: Facts, state: str) -> Why:
    if facts.job is None:
        return Why("no-job", "no training job is set up", "`python -m ops train STACK` starts one")
    status = facts.job.get("status") or {}
    if status.get("jobDeploymentStatus") in ("Failed", "ValidationFailed"):
        return Why(
            "job-refused",
            f"the job was refused: {_one_line(status.get('message') or status.get('reason'))}",
            "mend what it names, then `python -m ops train STACK`",
        )
    if state == "PENDING":
        return Why(
            "starting",
            f"Ray sets the job up{': ' + _one_line(facts.ray_message) if facts.ray_message else ''}",
            "wait; its packages and first worker take up to a minute",
            waiting=True,
        )
    if state == "RUNNING":
        return Why("running", f"the job is running{'; its last word: ' + facts.last_line if facts.last_line else ''}", running=True)
    return Why("starting", "everything is there; the job is being submitted", "wait; it takes up to a minute", waiting=True)


# ---- reading Kubernetes' objects


def _labels(thing: Object) -> Mapping[str, str]:
    return (thing.get("metadata") or {}).get("labels") or {}


def _kind(pod: Object) -> str:
    labels = _labels(pod)
    if labels.get("ray.io/node-type") in ("head", "worker"):
        return str(labels["ray.io/node-type"])
    return "operator" if labels.get("app.kubernetes.io/name") == "kuberay-operator" else "submitter"


def _condition(thing: Object, kind: str) -> Mapping[str, Any]:
    found: Sequence[Mapping[str, Any]] = (thing.get("status") or {}).get("conditions") or []
    return next((condition for condition in found if condition.get("type") == kind), {})


def _is_ready(pod: Object) -> bool:
    return _condition(pod, "Ready").get("status") == "True" and not pod["metadata"].get("deletionTimestamp")


def _ready(pods: Sequence[Object], kind: str) -> bool:
    mine = [pod for pod in pods if _kind(pod) == kind]
    return bool(mine) and all(_is_ready(pod) for pod in mine)


def _requests(pod: Object) -> dict[str, str]:
    total: dict[str, float] = {}
    texts: dict[str, str] = {}
    for container in (pod.get("spec") or {}).get("containers") or []:
        for name, amount in ((container.get("resources") or {}).get("requests") or {}).items():
            total[name] = total.get(name, 0.0) + _quantity(str(amount))
            texts[name] = f"{total[name]:g}"
    return texts


def _allocatable(node: Object) -> Mapping[str, str]:
    return (node.get("status") or {}).get("allocatable") or {}


_UNITS = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _quantity(text: str) -> float:
    """https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/"""
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?\d+)?)([a-zA-Z]*)", str(text))
    return float(match[1]) * _UNITS.get(match[2], 1.0) if match else 0.0


def _shown(what: str, amount: float) -> str:
    return f"{amount:g} CPU{'' if amount == 1 else 's'}" if what == "cpu" else f"{amount / 2**30:.1f} GiB of {what}"


def _event(facts: Facts, pod: str, reasons: Sequence[str], containing: str = "") -> Object | None:
    mine = [
        event
        for event in _sorted(facts.events)
        if (event.get("involvedObject") or {}).get("name") == pod and event.get("reason") in reasons and containing in str(event.get("message"))
    ]
    return mine[-1] if mine else None


def _sorted(events: Sequence[Object]) -> list[Object]:
    return sorted(events, key=_time)


def _time(event: Object) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp") or "")


def _age(at: Any, now: datetime.datetime) -> float | None:
    if not at:
        return None
    then = at if isinstance(at, datetime.datetime) else datetime.datetime.fromisoformat(str(at).replace("Z", "+00:00"))
    return (now - then).total_seconds()


def _asgs(group: Object) -> set[str]:
    return {str(found.get("name")) for found in (group.get("resources") or {}).get("autoScalingGroups") or []}


def _label_of_group(group: Object) -> str:
    return str((group.get("labels") or {}).get("ray-train-efa/role") or "")


def _not_ready(nodes: Sequence[Object]) -> str:
    bad = [node for node in nodes if _condition(node, "Ready").get("status") != "True"]
    return "; ".join(f"{node['metadata']['name']}: {_one_line(_condition(node, 'Ready').get('message')) or 'no word'}" for node in bad[:2])


def _one_line(text: Any) -> str:
    return " ".join(str(text or "").split())[:300]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [""])[-1][:300]
