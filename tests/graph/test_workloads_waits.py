"""What `pulumi up` waits for, and when it stops waiting: from the API's own JSON to a sentence for a person."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import config
from workloads import diagnosis, job, manifests, storage, watch
from workloads.diagnosis import Cause, Devices, Moment, RayPods

WANT = RayPods(made_from="new", workers=2, autoscaled=False, way_out="Ask for less")
BAD_IMAGE = "rpc error: code = NotFound desc = failed to pull and unpack image: docker.io/x/y:1: not found"


def pod(name, kind="worker", ready=True, made_from="new", going=False, scheduled=True, waiting=None, message="", container=None, **status):
    state = {"waiting": {"reason": waiting, "message": message}} if waiting else {"running": {}}
    conditions = [{"type": "Ready", "status": str(ready)}, {"type": "PodScheduled", "status": str(scheduled), "reason": "Unschedulable", "message": message}]
    found = {
        "metadata": {"name": name, "labels": {"ray.io/node-type": kind}, "annotations": {manifests.MADE_FROM: made_from}},
        "spec": {"containers": [{"image": "x/y:1", "resources": {"requests": {"cpu": "46", "memory": "900Gi"}}}]},
        "status": {
            "phase": "Running",
            "conditions": conditions,
            "containerStatuses": [{"name": f"ray-{kind}", "image": "x/y:1", "ready": ready, "restartCount": 0, "state": state, **(container or {})}],
            **status,
        },
    }
    if not scheduled:
        del found["status"]["containerStatuses"]
    if going:
        found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return found


HEAD, WORKERS = pod("head", "head"), [pod("a"), pod("b")]


def cluster(seen=2, generation=2, state="ready", **conditions):
    return {
        "metadata": {"generation": generation},
        "status": {"observedGeneration": seen, "state": state, "conditions": [{"type": kind, "status": "True", **more} for kind, more in conditions.items()]},
    }


def look(pods, made=None, operators=(), want=WANT):
    return diagnosis.ray_cluster(cluster() if made is None else made, pods, operators, want)


def cause(moment):
    assert not moment.ready
    assert moment.causes, f"nothing but {moment.text}"
    return moment.causes[0]


# The Ray cluster


def test_a_cluster_is_ready_when_its_head_and_every_worker_are():
    found = look([HEAD, *WORKERS])
    assert (found.ready, found.causes) == (True, ())


NOT_READY = {
    "an old status": lambda: look([HEAD, *WORKERS], cluster(seen=1)),
    "no state": lambda: look([HEAD, *WORKERS], cluster(state=None)),
    "no pods": lambda: look([]),
    "no head": lambda: look(WORKERS),
    "a worker too few": lambda: look([HEAD, WORKERS[0]]),
    "a worker that starts": lambda: look([HEAD, WORKERS[0], pod("b", ready=False)]),
    "a head that starts": lambda: look([pod("head", "head", ready=False), *WORKERS]),
    "workers that go": lambda: look([HEAD, *[pod(name, going=True) for name in "ab"]]),
    "workers from before the change": lambda: look([HEAD, *[pod(name, made_from="old") for name in "ab"]]),
    "a head from before the change": lambda: look([pod("head", "head", made_from="old"), *WORKERS]),
    "no cluster": lambda: diagnosis.ray_cluster(None, [], [], WANT),
}


@pytest.mark.parametrize("case", NOT_READY)
def test_fr22_a_status_that_says_ready_is_believed_only_of_the_pods_that_the_description_asks_for(case):
    assert not NOT_READY[case]().ready


def test_old_pods_that_still_stop_do_not_keep_a_new_cluster_from_being_ready():
    assert look([HEAD, *WORKERS, pod("old", made_from="old", going=True)]).ready


def test_fr22_pods_that_the_operator_lets_stand_after_a_change_are_named():
    found = cause(look([HEAD, WORKERS[0], pod("b", made_from="old")]))
    assert "pod b is from before the change" in found.text
    assert "kubectl delete" in found.text


def test_fr29_a_pod_without_a_place_says_what_it_asks_for_why_and_what_to_change():
    message = "0/1 nodes are available: 1 Insufficient memory."
    found = cause(look([HEAD, WORKERS[0], pod("b", ready=False, scheduled=False, message=message)]))
    assert found.text == "pod b finds no node (it asks for cpu 46, memory 900Gi): 0/1 nodes are available: 1 Insufficient memory. Ask for less"
    assert found.patience <= 60


def test_a_pod_that_waits_for_an_old_pods_place_is_not_stuck():
    waits = pod("b", ready=False, scheduled=False, message="0/1 nodes are available")
    assert look([HEAD, WORKERS[0], waits, pod("old", going=True)]).causes == ()


def test_a_worker_that_waits_for_an_autoscaler_has_time_for_a_new_node():
    waits = pod("b", ready=False, scheduled=False, message="0/1 nodes are available")
    autoscaled = RayPods(made_from="new", workers=2, autoscaled=True, way_out="")
    assert cause(look([HEAD, WORKERS[0], waits], want=autoscaled)).patience > 600
    head = pod("head", "head", ready=False, scheduled=False, message="0/1 nodes are available")
    assert cause(look([head, *WORKERS], want=autoscaled)).patience <= 60, "the head's node is there or never will be"


STUCK = {
    "an image that is not there": (pod("b", ready=False, waiting="ErrImagePull", message=BAD_IMAGE), "ray.image", 10),
    "its back-off": (pod("b", ready=False, waiting="ImagePullBackOff", message=f"Back-off pulling image: {BAD_IMAGE}"), "not found", 10),
    "no access": (pod("b", ready=False, waiting="ErrImagePull", message="403 Forbidden: pull access denied"), "denied", 10),
    "a name that is none": (pod("b", ready=False, waiting="InvalidImageName", message="couldn't parse"), "InvalidImageName", 10),
    "a registry that is silent": (pod("b", ready=False, waiting="ErrImagePull", message="dial tcp: lookup: no such host"), "no such host", 90),
    "a secret that is missing": (pod("b", ready=False, waiting="CreateContainerConfigError", message='secret "s3-keys" not found'), "s3-keys", 10),
    "memory": (pod("b", ready=False, container={"lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}), "ray.workerMemory", 10),
    "the head's memory": (
        pod("h", "head", ready=False, container={"lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}),
        "ray.headMemory",
        10,
    ),
    "an init container's memory": (
        pod("b", ready=False, initContainerStatuses=[{"name": "wait-gcs-ready", "ready": False, "state": {"terminated": {"reason": "OOMKilled"}}}]),
        "container wait-gcs-ready: killed for lack of memory",
        10,
    ),
    "a crash": (
        pod("b", ready=False, waiting="CrashLoopBackOff", container={"restartCount": 3, "lastState": {"terminated": {"reason": "Error", "exitCode": 2}}}),
        "exit code 2",
        10,
    ),
    "an eviction": (pod("b", ready=False, phase="Failed", reason="Evicted", message=""), "Evicted", 10),
}


@pytest.mark.parametrize("case", STUCK)
def test_a_pod_that_will_not_come_is_named_with_its_cause_within_seconds(case):
    bad, words, patience = STUCK[case]
    others = [HEAD, WORKERS[0]] if bad["metadata"]["labels"]["ray.io/node-type"] == "worker" else WORKERS
    found = cause(look([*others, bad]))
    assert words in found.text
    assert bad["metadata"]["name"] in found.text
    assert found.patience == patience


def test_a_start_that_a_busy_machine_was_too_slow_for_gets_more_tries_than_a_crash():
    """Ray gives up on its own processes after half a minute or more; on a quieter machine the next start succeeds."""

    def crashed(seconds):
        ended = {"reason": "Error", "exitCode": 1, "startedAt": "2026-01-01T00:00:00Z", "finishedAt": f"2026-01-01T00:0{seconds // 60}:{seconds % 60:02}Z"}
        container = {"restartCount": 3, "lastState": {"terminated": ended}}
        return look([HEAD, WORKERS[0], pod("b", ready=False, waiting="CrashLoopBackOff", container=container)])

    assert cause(crashed(70)).patience > 10 * cause(crashed(12)).patience


def test_a_crash_brings_its_last_words_along():
    assert cause(look([HEAD, WORKERS[0], STUCK["a crash"][0]])).log_of == ("b", "ray-worker")


def test_a_container_that_runs_again_after_several_ends_has_time_to_come_up():
    runs = {"restartCount": 3, "lastState": {"terminated": {"reason": "Error", "exitCode": 1}}}
    assert cause(look([HEAD, WORKERS[0], pod("b", ready=False, container=runs)])).patience == 60


def test_fr19_a_registry_that_throttles_has_time():
    found = cause(look([HEAD, WORKERS[0], pod("b", ready=False, waiting="ErrImagePull", message="toomanyrequests: rate exceeded")]))
    assert found.patience > 600
    assert "throttles" in found.text


def test_what_the_operator_can_not_make_is_told_in_its_own_words():
    refused = {"ReplicaFailure": {"reason": "FailedCreateHeadPod", "message": "exceeded quota: pods=1"}}
    assert "exceeded quota" in cause(look([], cluster(**refused))).text


def test_an_operator_that_does_not_start_is_looked_at_itself():
    found = cause(look([], cluster(seen=1), operators=[pod("stack-kuberay-1", ready=False, waiting="ErrImagePull", message=BAD_IMAGE)]))
    assert "stack-kuberay-1" in found.text
    silent = cause(look([], cluster(seen=1), operators=[pod("stack-kuberay-1")]))
    assert "does not answer" in silent.text


# The devices


def node(name="n1", gpus="4", efa="1", ready=True, role="gpu"):
    allocatable = {key: value for key, value in ((diagnosis.GPU, gpus), (diagnosis.EFA, efa)) if value is not None}
    return {
        "metadata": {"name": name, "labels": {config.ROLE_LABEL: role, "node.kubernetes.io/instance-type": "g6.12xlarge"}},
        "status": {"allocatable": allocatable, "conditions": [{"type": "Ready", "status": str(ready), "message": "kubelet is silent"}]},
    }


def daemon(name, wants=1):
    return {"metadata": {"name": name}, "spec": {"selector": {"matchLabels": {"app": name}}}, "status": {"desiredNumberScheduled": wants}}


def plugin_pod(name, where="n1", **how):
    made = pod(f"{name}-x", **how)
    made["metadata"]["labels"], made["spec"]["nodeName"] = {"app": name}, where
    return made


NVIDIA, EFA = diagnosis.PLUGINS[diagnosis.GPU], diagnosis.PLUGINS[diagnosis.EFA]
DAEMONS = [daemon(NVIDIA), daemon(EFA)]
PLUGIN_PODS = [plugin_pod(NVIDIA), plugin_pod(EFA)]
TWO = Devices(nodes=2, gpus=4, efa=1)


def shown(nodes, want=TWO, daemons=DAEMONS, pods=PLUGIN_PODS):
    return diagnosis.devices(nodes, daemons, pods, want)


def test_every_gpu_node_shows_all_its_devices():
    assert shown([node("n1"), node("n2"), node("s", None, None, role="system")]).ready


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=5))
def test_devices_are_ready_only_where_enough_nodes_show_exactly_what_they_have(wanted, found):
    nodes = [node(f"n{i}", str(gpus), str(efa), ready) for i, (gpus, efa, ready) in enumerate(found)]
    up = [(gpus, efa) for gpus, efa, ready in found if ready]
    moment = shown(nodes, Devices(nodes=wanted, gpus=4, efa=1))
    assert moment.ready == (len(up) >= wanted and all(each == (4, 1) for each in up))
    assert moment.ready or moment.causes, "what is not ready has a likely cause"


def test_fr15_no_nodes_are_never_enough():
    assert "0 of 2 GPU nodes are ready" in cause(shown([])).text
    assert "kubelet is silent" in cause(shown([node("n1", ready=False), node("n2")])).text


def test_an_autoscaler_without_a_node_proves_nothing_and_says_so():
    found = shown([], Devices(nodes=0, gpus=4, efa=1))
    assert found.ready
    assert "unproven" in found.text
    assert not shown([node("n1", gpus="0")], Devices(nodes=0, gpus=4, efa=1)).ready, "a node that is there must be whole"


LACKING = {
    "a plugin that is not there": ([node(efa=None)], [daemon(NVIDIA)], [], "there is no DaemonSet aws-efa-k8s-device-plugin"),
    "a plugin that wants no pods": ([node(efa=None)], [daemon(NVIDIA), daemon(EFA, wants=0)], [], "wants 0 pods"),
    "a plugin that is elsewhere": ([node(efa="0")], DAEMONS, [plugin_pod(EFA, where="n2")], "has no pod there"),
    "a plugin that crashes": (
        [node(efa="0")],
        DAEMONS,
        [plugin_pod(EFA, ready=False, container={"restartCount": 4, "lastState": {"terminated": {"exitCode": 1, "reason": "Error"}}})],
        "ended again and again (exit code 1",
    ),
    "a plugin without its image": ([node(gpus="0")], DAEMONS, [plugin_pod(NVIDIA, ready=False, waiting="ErrImagePull", message=BAD_IMAGE)], "not found"),
    "interfaces": ([node(efa="0")], DAEMONS, PLUGIN_PODS, "launched without all EFA interfaces"),
    "a driver": ([node(gpus="3")], DAEMONS, PLUGIN_PODS, "shows 3 of 4 nvidia.com/gpu, though the plugin's pod is there: the NVIDIA driver"),
}


@pytest.mark.parametrize("case", LACKING)
def test_fr16_devices_that_do_not_show_are_told_with_their_likely_cause(case):
    nodes, daemons, pods, words = LACKING[case]
    found = cause(shown(nodes, Devices(nodes=1, gpus=4, efa=1), daemons, pods))
    assert words in found.text
    assert found.text.startswith("node n1 (g6.12xlarge) shows")
    assert found.patience <= 120


def test_nodes_without_efa_are_not_asked_for_it():
    assert shown([node(efa=None)], Devices(nodes=1, gpus=4, efa=0)).ready


# The operator's definitions

CRDS = Path(os.environ.get("LAB_HOME", "/var/tmp/lab")) / "charts" / "kuberay-operator" / "crds"
SOME = manifests.Cluster(
    name="demo",
    image="repo/image:1",
    head_cpu=2,
    head_memory="8Gi",
    workers=manifests.whole_node(48, 181.4, 4, 1, (0, 2)),
    environment={},
    storage=storage.RunStorage(uri="", volume={"hostPath": {"path": "/x", "type": "DirectoryOrCreate"}}, one_node=True, keys=True),
    on_eks=True,
    hub_token=True,
    huge_pages_mib=512,
    lock_memory=True,
)
SOME_JOB = job.Job(cluster="demo", pods="x", image="i:1", ranks=1, settings={}, code={"a.py": ""}, environment={}, pip=("x",), deadline=60, on_eks=True)
DOCUMENTS = {"rayclusters": manifests.ray_cluster(SOME), "rayjobs": job.ray_job(SOME_JOB)}


@pytest.mark.skipif(not CRDS.is_dir(), reason=f"the operator's CRDs are not in {CRDS}")
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_the_operators_definitions_know_every_field_of_ours(kind):
    found = yaml.safe_load((CRDS / f"ray.io_{kind}.yaml").read_text())
    assert diagnosis.crd(found, kind, DOCUMENTS[kind], "").ready, diagnosis.crd(found, kind, DOCUMENTS[kind], "").causes
    (version,) = [v for v in found["spec"]["versions"] if v["name"] == "v1"]
    of_spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert wrong_types(of_spec, DOCUMENTS[kind]) == []
    del of_spec["properties"]["submissionMode" if kind == "rayjobs" else "authOptions"]
    assert not diagnosis.crd(found, kind, DOCUMENTS[kind], "").ready, "a CRD from before the field"


def wrong_types(schema, value, path="spec"):
    """Where a document has another type, or lacks what the schema requires."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, (int, str)) else [path]
    if "type" not in schema:
        return []
    if not isinstance(value, kinds[schema["type"]]):
        return [path]
    found = [f"{path}.{key} is missing" for key in schema.get("required", []) if key not in value]
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{path} = {value}")
    if isinstance(value, dict):
        inner = {**dict.fromkeys(value, schema.get("additionalProperties", {})), **schema.get("properties", {})}
        return found + [wrong for key in value for wrong in wrong_types(inner[key], value[key], f"{path}.{key}")]
    return found + ([wrong for each in value for wrong in wrong_types(schema.get("items", {}), each, f"{path}[]")] if isinstance(value, list) else [])


def definition(**properties):
    return {"spec": {"versions": [{"name": "v1", "schema": {"openAPIV3Schema": {"properties": {"spec": {"properties": properties}}}}}]}}


def test_fr22_an_old_definition_is_refused_with_what_it_would_drop_and_the_command_that_updates_it():
    spec = {"rayVersion": "2.58.0", "authOptions": {"mode": "token"}, "workerGroupSpecs": [{"groupName": "a", "idle": 1}]}
    old = definition(rayVersion={"type": "string"}, workerGroupSpecs={"type": "array", "items": {"properties": {"groupName": {}}}})
    found = cause(diagnosis.crd(old, "rayclusters.ray.io", spec, "helm show crds x | kubectl apply"))
    assert "would drop spec.authOptions, spec.workerGroupSpecs[].idle; update it" in found.text
    assert found.text.endswith("helm show crds x | kubectl apply")
    assert "has no rayclusters.ray.io" in cause(diagnosis.crd(None, "rayclusters.ray.io", spec, "")).text


def test_fields_of_a_free_form_are_no_unknown_ones():
    free = {"properties": {"params": {"additionalProperties": {"type": "string"}}, "any": {"x-kubernetes-preserve-unknown-fields": True}}}
    assert diagnosis.unknown_fields(free, {"params": {"num-gpus": "0"}, "any": {"a": {"b": 1}}}) == []


# A folder of a node


def test_fr43_a_folder_of_a_node_is_refused_where_pods_could_be_on_another():
    one, two = node("n1"), node("n2")
    assert diagnosis.one_node([one]).ready
    assert "2 nodes take pods (n1, n2)" in cause(diagnosis.one_node([one, two])).text
    two["spec"] = {"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]}
    assert diagnosis.one_node([one, two]).ready, "kind's control plane takes no pods"
    two["spec"] = {"unschedulable": True}
    assert diagnosis.one_node([one, two]).ready


# The wait


def settled(moments, limit=100.0):
    """Runs the wait over what each second shows; the last is repeated. Returns (seconds, what was said)."""
    seconds, said = [0.0], []

    async def one():
        shown = moments[min(int(seconds[0]), len(moments) - 1)]
        if isinstance(shown, Exception):
            raise shown
        return shown

    async def pause(_):
        seconds[0] += 1

    asyncio.run(watch.settle(one, limit, said.append, clock=lambda: seconds[0], pause=pause))
    return seconds[0], said


def bad(key, patience):
    return Moment(False, "coming", (Cause(key, f"{key} is wrong", patience),))


def test_a_wait_ends_when_all_is_ready_and_says_each_stage_once():
    seconds, said = settled([Moment(False, "a"), Moment(False, "a"), Moment(False, "b"), Moment(True, "c")])
    assert seconds == 3
    assert said == ["a, 0 s", "b, 2 s"]


@given(patience=st.integers(0, 50), before=st.integers(0, 20))
def test_a_cause_ends_the_wait_when_it_has_lasted_as_long_as_it_may(patience, before):
    with pytest.raises(watch.Gone, match="x is wrong"):
        settled([Moment(False, "coming")] * before + [bad("x", patience)])


def test_a_cause_that_mends_itself_starts_anew():
    flickers = [bad("x", 5), Moment(False, "coming")] * 20
    assert settled([*flickers, Moment(True, "ready")])[0] == 40


def test_a_wait_without_end_has_one():
    with pytest.raises(watch.Stuck, match="not ready after 2 minutes: coming"):
        settled([Moment(False, "coming")], limit=120)


def test_an_api_server_that_is_away_for_a_moment_is_waited_for_and_one_that_stays_away_is_told():
    assert settled([OSError("refused")] * 20 + [Moment(True, "ready")])[0] == 20
    with pytest.raises(watch.Gone, match="the Kubernetes API does not answer: refused"):
        settled([OSError("refused")])
