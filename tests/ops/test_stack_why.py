"""Why the job is not running: objects as Kubernetes 1.34, KubeRay 1.6 and EKS answer them, and the one sentence that comes of them."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops import why

NOW = datetime.datetime(2026, 11, 29, 12, 0, tzinfo=datetime.UTC)
PREEMPTION = " no new claims to deallocate, preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod."


def ago(seconds: float) -> str:
    return (NOW - datetime.timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def pod(
    name: str, kind: str = "worker", ready: bool = True, unschedulable: str = "", waiting: tuple[str, str] | None = None, **requests: str
) -> dict[str, Any]:
    labels = {"operator": {"app.kubernetes.io/name": "kuberay-operator"}, "submitter": {"app.kubernetes.io/component": "ray-job-submitter"}}
    conditions = [{"type": "PodScheduled", "status": "False" if unschedulable else "True", "message": unschedulable}]
    conditions.append({"type": "Ready", "status": "True" if ready else "False"})
    state: dict[str, Any] = {"running": {}} if ready else {"waiting": dict(zip(("reason", "message"), waiting or ("ContainerCreating", ""), strict=True))}
    return {
        "metadata": {"name": name, "labels": labels.get(kind, {"ray.io/node-type": kind, "ray.io/cluster": "c"}), "creationTimestamp": ago(60)},
        "spec": {"containers": [{"image": "registry/image:1", "resources": {"requests": requests or {"cpu": "1"}}}], "nodeSelector": {"role": "gpu"}},
        "status": {
            "phase": "Running" if ready else "Pending",
            "conditions": conditions,
            "containerStatuses": [] if unschedulable else [{"name": "main", "image": "registry/image:1", "state": state, "restartCount": 3}],
        },
    }


def node(name: str = "n1", ready: bool = True, group: str = "", **allocatable: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"eks.amazonaws.com/nodegroup": group}, "creationTimestamp": ago(60)},
        "status": {"allocatable": {"cpu": "2", "memory": "16Gi", **allocatable}, "conditions": [{"type": "Ready", "status": str(ready), "message": "PLEG"}]},
    }


def tainted(name: str, key: str, value: str) -> dict[str, Any]:
    found = node(name)
    found["metadata"]["labels"]["role"] = "gpu"  # what the pod selects
    found["spec"] = {"taints": [{"key": key, "value": value, "effect": "NoSchedule"}]}
    return found


def event(name: str, reason: str, message: str, seconds: float = 30, kind: str = "Pod") -> dict[str, Any]:
    return {"involvedObject": {"name": name, "kind": kind}, "reason": reason, "message": message, "type": "Warning", "lastTimestamp": ago(seconds)}


def facts(**more: Any) -> why.Facts:
    """A stack in which all is well and the job is about to start; with what a test changes."""
    usual: dict[str, Any] = {
        "now": NOW,
        "job": {"status": {}},
        "cluster": {"status": {"desiredWorkerReplicas": 1}},
        "pods": [pod("head", "head"), pod("w1")],
        "operator": [pod("op", "operator")],
        "operator_wanted": 1,
        "nodes": [node()],
    }
    return why.Facts(**{**usual, **more})


def worker(**how: Any) -> list[dict[str, Any]]:
    return [pod("head", "head"), pod("w1", ready=False, **how)]


def group(wanted: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "nodegroupName": "gpu-g6-12xlarge",
        "scalingConfig": {"desiredSize": wanted},
        "labels": {"ray-train-efa/role": "gpu"},
        "resources": {"autoScalingGroups": [{"name": "asg"}]},
        "createdAt": NOW - datetime.timedelta(seconds=100),
        **more,
    }


def activity(message: str) -> dict[str, Any]:
    return {"AutoScalingGroupName": "asg", "StatusCode": "Failed", "StatusMessage": message}


def killed(name: str) -> dict[str, Any]:
    found = pod(name, ready=False, waiting=("CrashLoopBackOff", "back-off 5m0s"))
    found["status"]["containerStatuses"][0]["lastState"] = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    return found


GONE = 'failed to pull and unpack image "registry/image:1": failed to resolve reference: not found'
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "an image that does not exist": (
        {"pods": worker(waiting=("ImagePullBackOff", "Back-off pulling image")), "events": [event("w1", "Failed", GONE)]},
        "image",
        "does not exist there",
    ),
    "a registry that refuses": (
        {"pods": worker(waiting=("ErrImagePull", "401 Unauthorized"))},
        "image",
        "refuses the nodes",
    ),
    "more CPU than any node has": (
        {"pods": worker(unschedulable="0/1 nodes are available: 1 Insufficient cpu." + PREEMPTION, cpu="500")},
        "unsatisfiable",
        "asks for 500 CPUs, and the biggest node has 2 CPUs: no node can ever hold it",
    ),
    "CPU that others hold": ({"pods": worker(unschedulable="0/1 nodes are available: 1 Insufficient cpu.", cpu="1")}, "full", "other pods hold now"),
    "memory": (
        {"pods": worker(unschedulable="0/1 nodes are available: 1 Insufficient memory.", memory="64Gi")},
        "unsatisfiable",
        "64.0 GiB of memory, and the biggest node has 16.0 GiB",
    ),
    "EFA that no node offers": (
        {"pods": worker(unschedulable="0/1 nodes are available: 1 Insufficient vpc.amazonaws.com/efa.", **{"vpc.amazonaws.com/efa": "1"})},
        "device-efa",
        "no node offers any: its device plugin is not installed",
    ),
    "a plugin that fits no node": (
        {
            "pods": worker(unschedulable="0/1 nodes are available: 1 Insufficient nvidia.com/gpu.", **{"nvidia.com/gpu": "4"}),
            "daemons": [{"metadata": {"name": "nvidia-device-plugin"}, "status": {"desiredNumberScheduled": 0}}],
        },
        "device-gpu",
        "asks for 4 GPUs, and no node offers any: its device plugin wants no pod on any node",
    ),
    "fewer devices than asked for": (
        {
            "pods": worker(unschedulable="0/1 nodes are available: 1 Insufficient vpc.amazonaws.com/efa.", **{"vpc.amazonaws.com/efa": "32"}),
            "nodes": [node(**{"vpc.amazonaws.com/efa": "1"})],
        },
        "device-efa",
        "asks for 32 EFA interfaces, and the best node has 1",
    ),
    "a taint": (
        {"pods": worker(unschedulable="0/1 nodes are available: 1 node(s) had untolerated taint {team: other}." + PREEMPTION)},
        "taint",
        "they carry the taint team=other",
    ),
    "a taint that the scheduler of 1.34 does not name": (
        {
            "pods": worker(unschedulable="0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, 1 node(s) had untolerated taint(s)."),
            "nodes": [node("other"), tainted("n2", "team", "other")],
        },
        "taint",
        "node n2 carries the taint team=other",
    ),
    "a node that is not ready yet": (
        {
            "pods": worker(unschedulable="0/1 nodes are available: 1 node(s) had untolerated taint(s)."),
            "nodes": [tainted("n2", "node.kubernetes.io/not-ready", "")],
        },
        "node-not-ready",
        "waits for node n2, which is not-ready",
    ),
    "no such node": (
        {"pods": worker(unschedulable="0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.")},
        "selector",
        "no node with the label role=gpu",
    ),
    "an operator scaled to zero": ({"operator": [], "operator_wanted": 0, "pods": []}, "operator", "scaled to zero"),
    "an operator without its image": (
        {"operator": [{**pod("op", "operator", ready=False, waiting=("ErrImagePull", "not found"))}]},
        "operator",
        "the KubeRay operator is not running: the operator (op) can't get its image",
    ),
    "a pull under way": (
        {"pods": worker(), "events": [event("w1", "Pulling", 'Pulling image "registry/image:1"', 200)]},
        "pulling",
        "is pulling its image registry/image:1 since 3m 20s",
    ),
    "a container killed for memory": ({"pods": [pod("head", "head"), killed("w1")]}, "memory", "killed for lack of memory, 3 times"),
    "a missing secret": (
        {"pods": worker(waiting=("CreateContainerConfigError", 'secret "hugging-face" not found'))},
        "container",
        'secret "hugging-face" not found',
    ),
    "a volume that does not come": (
        {"pods": worker(), "events": [event("w1", "FailedMount", "MountVolume.SetUp failed: timed out")]},
        "volume",
        "MountVolume.SetUp failed",
    ),
    "pods that a quota of the cluster refuses": (
        {"pods": [pod("head", "head")], "events": [event("c", "FailedToCreateWorkerPod", "exceeded quota: compute", kind="RayCluster")]},
        "pods-refused",
        "exceeded quota",
    ),
    "a vCPU quota": (
        {"groups": [group()], "activities": [activity("VcpuLimitExceeded: You have requested more vCPU capacity than your current limit of 64")]},
        "quota",
        "0 of 2 nodes of gpu-g6-12xlarge exist: the account's vCPU quota is too small",
    ),
    "no capacity": (
        {"groups": [group()], "activities": [activity("We currently do not have sufficient g6.12xlarge capacity in the Availability Zone you requested")]},
        "capacity",
        "EC2 has no capacity",
    ),
    "nodes that do not join": (
        {"groups": [group(createdAt=NOW - datetime.timedelta(seconds=1300))]},
        "node-not-joined",
        "0 of 2 nodes of gpu-g6-12xlarge have joined the cluster after 21m 40s; the rest should be here by now",
    ),
    "nodes on their way": ({"groups": [group()], "nodes": [node(group="gpu-g6-12xlarge")]}, "node-not-joined", "1 of 2 nodes"),
    "a node that is not ready": (
        {"groups": [group(1)], "nodes": [node(group="gpu-g6-12xlarge", ready=False)]},
        "node-not-ready",
        "0 of 1 nodes of gpu-g6-12xlarge are ready: n1: PLEG",
    ),
    "the auto-stop": (
        {"groups": [group(0, taints=[{"key": "ray-train-efa/stopped"}])]},
        "stopped",
        "set to zero nodes by the auto-stop",
    ),
    "a group that EKS calls ill": (
        {"groups": [group(health={"issues": [{"code": "AsgInstanceLaunchFailures", "message": "no luck"}]})]},
        "node-group",
        "AsgInstanceLaunchFailures: no luck",
    ),
    "a submitter without a place": (
        {"pods": [pod("head", "head"), pod("w1"), pod("s", "submitter", ready=False, unschedulable="0/1 nodes are available: 1 Insufficient cpu.", cpu="1")]},
        "full",
        "the job's submitter (s) asks for 1 CPU",
    ),
    "no job": ({"job": None}, "no-job", "no training job is set up"),
    "a refused job": ({"job": {"status": {"jobDeploymentStatus": "ValidationFailed", "message": "backoffLimit"}}}, "job-refused", "backoffLimit"),
    "a failed job": ({"ray_state": "FAILED", "ray_message": "x\nerror: loss is not finite\n"}, "failed", "the job has failed: error: loss is not finite"),
    "a job that runs": ({"ray_state": "RUNNING", "last_line": "step 5/20"}, "running", "its last word: step 5/20"),
    "a job being set up": ({"ray_state": "PENDING"}, "starting", "Ray sets the job up"),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_sentence_names_the_cause(case: str) -> None:
    changed, cause, words = CASES[case]
    found = why.explain(facts(**changed))
    assert found.cause == cause, found
    assert words in found.sentence
    assert "\n" not in found.sentence
    assert found.do or found.running, "a cause without a way out helps nobody"


def test_what_will_never_come_is_told_before_what_only_takes_time() -> None:
    starting = pod("head", "head", ready=False)
    found = why.explain(facts(pods=[starting, pod("w1", ready=False, unschedulable="0/1 nodes are available: 1 Insufficient cpu.", cpu="500")]))
    assert found.cause == "unsatisfiable"


def test_an_init_container_that_did_its_work_is_no_crash() -> None:
    starting = pod("w1", ready=False)
    starting["status"]["initContainerStatuses"] = [{"name": "wait-gcs-ready", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}]
    assert why.explain(facts(pods=[pod("head", "head"), starting])).cause == "starting"


def test_the_operator_comes_before_the_pods_that_it_does_not_make() -> None:
    found = why.explain(facts(operator=[], operator_wanted=0, pods=worker(waiting=("ErrImagePull", "not found"))))
    assert found.cause == "operator"


texts = st.text(max_size=30)


@given(texts, texts, texts, st.sampled_from(["Pending", "Running", "Failed", "Unknown", "Succeeded"]))
def test_no_words_of_kubernetes_break_the_sentence(unschedulable: str, reason: str, message: str, phase: str) -> None:
    bad = pod("w1", ready=False, unschedulable=unschedulable, waiting=(reason, message))
    bad["status"]["phase"] = phase
    found = why.explain(facts(pods=[pod("head", "head"), bad], events=[event("w1", reason, message)]))
    assert found.sentence
    assert "\n" not in found.sentence
