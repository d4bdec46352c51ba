"""The documents that Kubernetes gets: plain data, checked without Pulumi."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import config
import versions
from config import BadInput
from training import schema
from training.prepare_settings import PrepareSettings
from training.settings import Settings
from training.transport import preflight
from workloads import build, charts, job, kuberay, manifests, storage

ROOT = Path(__file__).parents[2]
G6 = manifests.whole_node(48, 181.4, 4, 1, (2, 2))
LOCAL = manifests.Workers(least=2, most=2, cpu=0.4, memory="3Gi")
BUCKET = storage.RunStorage(uri="s3://bucket/runs")
EXISTING = {"kind": "existing", "context": "kind-lab"}


def cluster(**changes):
    plain = manifests.Cluster(
        name="demo", image="repo/image:1", head_cpu=2, head_memory="8Gi", workers=G6, environment=config.nccl_environment(), storage=BUCKET, on_eks=True
    )
    return dataclasses.replace(plain, **changes)


def pods(spec):
    (group,) = spec["workerGroupSpecs"]
    return spec["headGroupSpec"]["template"]["spec"], group["template"]["spec"]


def environment(pod):
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in pod["containers"][0]["env"]}


def planned(**changes):
    plain = job.Job(
        cluster="demo",
        pods="0123456789ab",
        image="repo/image:1",
        ranks=8,
        settings={"data": "s3://bucket/data", "workers": 8, "model": {"random": "tiny"}},
        code={"training/job.py": "print()", "training/transport/gate.py": "pass"},
        environment={"NCCL_DEBUG": "INFO"},
        pip=(),
        deadline=3600,
        on_eks=True,
    )
    return dataclasses.replace(plain, **changes)


def everything(value):
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from everything(inner)


# Charts


def test_fr15_the_efa_plugin_wants_a_pod_on_whatever_type_the_stack_has():
    values = charts.efa_plugin("g7.12xlarge", "eu-north-1")
    assert values["supportedInstanceLabels"] == {"keys": ["node.kubernetes.io/instance-type"], "values": ["g7.12xlarge"]}
    assert values["image"]["repository"].split(".")[3] == "eu-north-1", "the chart's own default is us-west-2 whatever the region"


def test_fr16_plugins_tolerate_the_taint_of_the_gpu_nodes_and_the_efa_plugin_stays_where_efa_is():
    for values in (charts.efa_plugin("p5.48xlarge", "us-west-2"), charts.nvidia_plugin()):
        assert {"key": config.GPU_TAINT[0], "operator": "Exists", "effect": config.GPU_TAINT[2]} in values["tolerations"]
    assert charts.efa_plugin("p5.48xlarge", "us-west-2")["nodeSelector"] == dict([config.EFA_LABEL])


def test_gpu_pods_do_not_get_every_efa_device_past_its_plugin():
    assert charts.nvidia_plugin()["mofedEnabled"] is False


@pytest.mark.parametrize("name", versions.CHARTS)
def test_charts_are_pinned_and_can_come_from_elsewhere(name):
    pinned = charts.source(name, None)
    assert (pinned.chart, pinned.repository, pinned.version) == (name, *versions.CHARTS[name])
    folder = charts.source(name, {name: {"chart": "/charts/x"}})
    assert (folder.chart, folder.repository, folder.version) == ("/charts/x", None, None)
    mirror = charts.source(name, {name: {"repository": "https://mirror", "image": "mirror:5000/a/b:7"}})
    assert (mirror.chart, mirror.repository, mirror.version) == (name, "https://mirror", versions.CHARTS[name][1])
    registry = charts.source(name, {name: {"chart": "oci://mirror/x"}})
    assert (registry.repository, registry.version) == (None, versions.CHARTS[name][1]), "the pin holds in another registry"


def test_an_image_from_elsewhere_reaches_the_charts():
    assert charts.nvidia_plugin("mirror:5000/a/b:7")["image"] == {"repository": "mirror:5000/a/b", "tag": "7"}
    assert charts.kuberay("x", {}, "mirror:5000/kuberay")["image"] == {"repository": "mirror:5000/kuberay"}, "a port is no tag"


def test_fr24_each_stack_has_an_operator_that_sees_its_own_namespace_alone():
    one, other = charts.kuberay("a-kuberay", {}), charts.kuberay("b-kuberay", {})
    assert one["singleNamespaceInstall"] is True
    assert one["fullnameOverride"] != other["fullnameOverride"], "cluster-wide objects of two releases must not have one name"
    assert one["resources"]["limits"]["memory"]
    assert one["metrics"] == {"enabled": True}


# The Ray cluster


def test_the_ray_version_is_the_images():
    assert manifests.ray_cluster(cluster())["rayVersion"] == versions.RAY


def test_fr22_a_changed_cluster_gets_new_pods():
    assert manifests.ray_cluster(cluster())["upgradeStrategy"] == {"type": "Recreate"}


def test_fr28_nothing_is_open_to_the_outside_and_a_token_is_asked_of_everyone():
    spec = manifests.ray_cluster(cluster())
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    for value in everything({**spec, "job": job.ray_job(planned())}):
        if isinstance(value, dict):
            assert not {"hostPort", "hostNetwork", "nodePort"} & set(value), value
            assert value.get("type") not in ("LoadBalancer", "NodePort")


def test_fr28_only_the_clusters_own_pods_the_operator_and_the_submitter_get_in():
    policy = manifests.network_policy("demo", kuberay.pod_labels("demo"))
    assert policy["podSelector"] == {"matchLabels": {"ray.io/cluster": "demo"}}
    inside, callers = policy["ingress"]
    assert inside == {"from": [{"podSelector": {"matchLabels": {"ray.io/cluster": "demo"}}}]}
    assert callers["ports"] == [{"protocol": "TCP", "port": 8265}], "neither 6379 nor 10001"
    who = [entry["podSelector"]["matchLabels"] for entry in callers["from"]]
    assert who == [kuberay.pod_labels("demo"), job.ray_job(planned())["submitterPodTemplate"]["metadata"]["labels"]]
    assert all(set(entry) == {"podSelector"} for rule in policy["ingress"] for entry in rule["from"]), "no other namespace, no addresses"


def test_the_submitter_is_not_taken_for_a_pod_of_the_cluster():
    assert not any(key.startswith("ray.io/") for key in job.ray_job(planned())["submitterPodTemplate"]["metadata"]["labels"])


def test_fr25_the_head_is_a_cpu_pod_without_actors_of_the_training():
    head, worker = pods(manifests.ray_cluster(cluster()))
    start = manifests.ray_cluster(cluster())["headGroupSpec"]["rayStartParams"]
    assert (start["num-cpus"], start["num-gpus"]) == ("0", "0")
    assert environment(head)["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert "NVIDIA_VISIBLE_DEVICES" not in environment(worker), "the device plugin's to set"
    assert head["nodeSelector"] == {config.ROLE_LABEL: "system"}
    assert "tolerations" not in head, "it stays off the GPU nodes"
    assert head["containers"][0]["resources"]["limits"]["memory"] == "8Gi"


def test_a_worker_takes_its_gpu_node_whole():
    _, worker = pods(manifests.ray_cluster(cluster()))
    resources = worker["containers"][0]["resources"]
    for kind in ("requests", "limits"):
        assert (resources[kind]["nvidia.com/gpu"], resources[kind]["vpc.amazonaws.com/efa"]) == (4, 1)
    assert resources["requests"]["cpu"] == "46"
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == "179Gi"
    assert "cpu" not in resources["limits"], "a CPU limit throttles data loading for nothing"
    (rule,) = worker["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchLabels"] == {"ray.io/cluster": "demo", "ray.io/node-type": "worker"}
    assert {"key": config.GPU_TAINT[0], "operator": "Exists", "effect": config.GPU_TAINT[2]} in worker["tolerations"]


@given(vcpus=st.integers(1, 400), gib=st.floats(1, 5000), gpus=st.integers(0, 16), efa=st.integers(0, 32))
def test_a_worker_never_asks_for_more_than_the_node_has(vcpus, gib, gpus, efa):
    found = manifests.whole_node(vcpus, gib, gpus, efa, (1, 2))
    assert 1 <= found.cpu <= vcpus
    assert 1 <= int(found.memory.removesuffix("Gi")) <= gib


def test_the_environment_is_the_gates_and_no_line_is_folded():
    for pod in pods(manifests.ray_cluster(cluster())):
        found = environment(pod)
        for name, value in preflight.environment("any", "/x", "run", 0, 0).items():
            assert name == "NCCL_DEBUG_FILE" or found[name] == value
        assert "NCCL_DEBUG_FILE" not in found, "each rank of each attempt has its own"
        assert found["RAY_DEDUP_LOGS"] == "0"
        assert "pod-id-link" in found["NCCL_SOCKET_IFNAME"]


def test_pods_have_no_right_that_they_do_not_need():
    head, worker = pods(manifests.ray_cluster(cluster()))
    submitter = job.ray_job(planned())["submitterPodTemplate"]["spec"]
    for pod in (head, worker, submitter):
        assert pod["automountServiceAccountToken"] is False
        assert pod["containers"][0]["securityContext"] == manifests.restricted()
    assert manifests.restricted()["capabilities"] == {"drop": ["ALL"]}


def test_ray_writes_the_number_of_workers_when_it_scales_and_we_when_it_does_not():
    fixed = manifests.ray_cluster(cluster())
    assert fixed["enableInTreeAutoscaling"] is False
    assert [fixed["workerGroupSpecs"][0][key] for key in ("replicas", "minReplicas", "maxReplicas")] == [2, 2, 2]
    scaled = manifests.ray_cluster(cluster(workers=dataclasses.replace(G6, least=0, most=4)))
    assert scaled["enableInTreeAutoscaling"] is True
    assert "replicas" not in scaled["workerGroupSpecs"][0]
    assert scaled["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"] is True, "its autoscaler asks the API server"


def test_a_stopped_worker_is_drained_and_not_crashed():
    _, worker = pods(manifests.ray_cluster(cluster()))
    command = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert "drain-node" in command
    assert "PREEMPTION" in command
    assert "ray stop" not in command
    told, left = (int(re.search(pattern, command)[1]) for pattern in (r"^timeout (\d+) ", r"--deadline-remaining-seconds (\d+)"))
    assert f"&& for i in $(seq {left}); do" in command, "it stays until the run has left: only then are Ray's processes told to end"
    assert told + left < worker["terminationGracePeriodSeconds"], "else the kubelet kills the workers while they write their checkpoint"
    assert left >= 25, "a checkpoint takes a while"


def test_cpu_workers_of_an_existing_cluster_ask_for_no_device_label_or_taint():
    head, worker = pods(manifests.ray_cluster(cluster(workers=LOCAL, on_eks=False)))
    assert (worker["nodeSelector"], head["nodeSelector"], worker["tolerations"], worker["affinity"]) == ({}, {}, [], {})
    requests = worker["containers"][0]["resources"]["requests"]
    assert requests["cpu"] == "400m"
    assert not [name for name in requests if "/" in name]


def test_a_hugging_face_token_comes_from_a_secret():
    assert "HF_TOKEN" not in environment(pods(manifests.ray_cluster(cluster()))[1])
    for pod in pods(manifests.ray_cluster(cluster(hub_token=True))):
        assert environment(pod)["HF_TOKEN"] == {"secretKeyRef": {"name": manifests.TOKEN_SECRET, "key": manifests.TOKEN_KEY}}


def test_huge_pages_and_locked_memory_are_the_workers_and_only_where_asked_for():
    plain_head, plain = pods(manifests.ray_cluster(cluster()))
    head, worker = pods(manifests.ray_cluster(cluster(huge_pages_mib=5120, lock_memory=True)))
    assert head == plain_head
    (container,), (without,) = worker["containers"], plain["containers"]
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["hugepages-2Mi"] == "5120Mi"
        assert "hugepages-2Mi" not in without["resources"][kind]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert "add" not in without["securityContext"]["capabilities"]
    assert {"name": "huge-pages", "emptyDir": {"medium": "HugePages-2Mi"}} in worker["volumes"]


def test_the_images_ray_is_looked_at_before_the_head_starts():
    head, _ = pods(manifests.ray_cluster(cluster()))
    (check,) = head["initContainers"]
    assert check["image"] == head["containers"][0]["image"]
    script = check["command"][-1]
    compile(script, "check", "exec")
    assert f"'{versions.RAY}'" in script
    assert check["terminationMessagePolicy"] == "FallbackToLogsOnError", "the reason stands in the pod's status, and so in what `up` says"


def test_every_pod_tells_which_description_it_is_made_from():
    def marks(spec):
        group = spec["workerGroupSpecs"][0]["template"]
        return {t["metadata"]["annotations"][manifests.MADE_FROM] for t in (spec["headGroupSpec"]["template"], group)}

    plain = manifests.ray_cluster(cluster())
    assert len(marks(plain)) == 1
    assert marks(manifests.ray_cluster(cluster(image="repo/image:2"))) != marks(plain)
    assert marks(manifests.ray_cluster(cluster(environment={"A": "b"}))) != marks(plain)
    more = dataclasses.replace(G6, least=3, most=3)
    assert marks(manifests.ray_cluster(cluster(workers=more))) == marks(plain), "another number of workers leaves those that are there"


# Storage


def test_fr43_a_folder_of_a_node_keeps_all_pods_on_that_node():
    stack = config.load({"cluster": EXISTING, "storage": {"hostPath": "/var/lib/runs"}})
    found = storage.run_storage(stack)
    assert found.uri == "/storage/runs"
    head, worker = pods(manifests.ray_cluster(cluster(workers=LOCAL, on_eks=False, storage=found)))
    (rule,) = worker["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"]["matchLabels"]["ray.io/node-type"] == "head"
    for pod in (head, worker):
        assert {"name": "storage", "hostPath": {"path": "/var/lib/runs", "type": "DirectoryOrCreate"}} in pod["volumes"]
        assert {"name": "storage", "mountPath": "/storage"} in pod["containers"][0]["volumeMounts"]


def test_a_shared_volume_is_claimed_for_many_writers():
    found = storage.run_storage(config.load({"cluster": EXISTING, "storage": {"claimGiB": 50, "storageClass": "nfs"}}))
    assert found.claim == {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "50Gi"}}, "storageClassName": "nfs"}
    assert found.volume == {"persistentVolumeClaim": {"claimName": storage.CLAIM}}
    assert not found.one_node


def test_an_s3_compatible_store_is_reached_by_its_url_and_keys_from_a_secret():
    stack = config.load({"cluster": EXISTING, "storage": {"endpoint": "http://minio.tools:9000", "bucket": "models", "prefix": "team/runs"}})
    found = storage.run_storage(stack)
    assert found.uri == "s3://models/team/runs?scheme=http&endpoint_override=minio.tools%3A9000&region=us-east-1"
    for pod in pods(manifests.ray_cluster(cluster(storage=found))):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert environment(pod)[name] == {"secretKeyRef": {"name": storage.KEYS_SECRET, "key": name}}


# The job


def test_the_code_is_the_whole_package_and_fits():
    files = job.source_files(build.TRAINING)
    assert {"training/__init__.py", "training/job.py", "training/transport/gate.py"} <= set(files)
    assert files["training/job.py"] == (ROOT / "training" / "job.py").read_text()
    assert not [name for name in files if "__pycache__" in name]


def test_code_that_no_configmap_holds_is_refused_with_its_biggest_files(tmp_path):
    package = tmp_path / "training"
    package.mkdir()
    for name, kib in (("small.py", 1), ("big.py", 500), ("bigger.py", 600)):
        (package / name).write_text("#" * kib * 1024)
    with pytest.raises(BadInput, match=r"1101 KiB.*holds 900; the biggest files are training/bigger.py \(600 KiB\), training/big.py \(500 KiB\)"):
        job.source_files(package)


def test_code_that_is_no_text_is_refused_by_name(tmp_path):
    package = tmp_path / "training"
    package.mkdir()
    (package / "odd.py").write_bytes(b"# \xff")
    with pytest.raises(BadInput, match=r"training/odd.py is no UTF-8 text"):
        job.source_files(package)


def test_the_configmap_and_its_mount_give_back_the_folder():
    made = planned()
    data = job.code_data(made)
    template = job.ray_job(made)["submitterPodTemplate"]["spec"]
    (volume,) = template["volumes"]
    assert volume["configMap"]["name"] == made.code_name
    assert {item["path"]: data[item["key"]] for item in volume["configMap"]["items"]} == made.files
    assert json.loads(made.files[job.SETTINGS]) == made.settings


CHANGES = {
    "image": "repo/image:2",
    "pods": "ba9876543210",
    "ranks": 4,
    "settings": {"data": "s3://bucket/other"},
    "code": {"training/job.py": "print(1)"},
    "environment": {"A": "b"},
    "pip": ("einops",),
    "deadline": 60,
}


@pytest.mark.parametrize("what", CHANGES)
def test_whatever_changes_the_run_is_another_job(what):
    assert planned(**{what: CHANGES[what]}).name != planned().name


@given(st.permutations(["a", "b", "c", "d"]))
def test_the_same_inputs_are_the_same_job_in_whatever_order(order):
    settings = {key: {inner: inner for inner in order} for key in order}
    other = {key: {inner: inner for inner in "abcd"} for key in "abcd"}
    assert planned(settings=settings).name == planned(settings=other).name
    assert planned(settings=settings).code_name == planned(settings=other).code_name


@given(settings=st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2), deadline=st.integers(1, 10**7))
def test_names_are_names_that_kubernetes_takes(settings, deadline):
    made = planned(settings=settings, deadline=deadline)
    for name in (made.name, made.code_name):
        assert len(name) <= 47
        assert name.replace("-", "").isalnum()
        assert name == name.lower()


def test_the_job_runs_on_the_cluster_there_is_and_does_not_vanish():
    spec = job.ray_job(planned())
    assert spec["clusterSelector"] == {"ray.io/cluster": "demo"}
    assert spec["backoffLimit"] == 0, "the operator refuses retries with a selected cluster"
    assert not {"ttlSecondsAfterFinished", "suspend"} & set(spec)
    assert spec["shutdownAfterJobFinishes"] is False
    runtime = yaml.safe_load(spec["runtimeEnvYAML"])
    assert runtime["working_dir"] == job.CODE
    assert "pip" not in runtime
    assert yaml.safe_load(job.ray_job(planned(pip=("einops==1",)))["runtimeEnvYAML"])["pip"] == ["einops==1"]


def test_the_submitter_is_small_and_on_a_system_node():
    template = job.ray_job(planned())["submitterPodTemplate"]["spec"]
    assert template["containers"][0]["resources"]["requests"]["cpu"] == "50m"
    assert template["nodeSelector"] == {config.ROLE_LABEL: "system"}
    assert template["restartPolicy"] == "Never"


def test_the_deadline_is_the_jobs_own_and_the_operators_comes_later():
    spec = job.ray_job(planned(deadline=90))
    assert spec["entrypoint"].startswith("timeout --signal=INT --kill-after=120 90 python -m training.job ")
    assert spec["activeDeadlineSeconds"] > 90


# What the stack makes of it


def settings_of(values, workers=G6):
    stack = config.load(values)
    return build.settings_of(stack, stack.training, workers, "s3://bucket/runs")


def test_the_cluster_decides_what_the_job_leaves_open():
    found = settings_of({"training": {"transport": "efa"}})
    assert found == {"workers": 8, "storage": "s3://bucket/runs", "nicsPerHost": 1, "transport": "efa"}
    given_anyway = settings_of({"training": {"workers": 4, "storage": "s3://other/runs"}})
    assert (given_anyway["workers"], given_anyway["storage"]) == (4, "s3://other/runs")
    assert "nicsPerHost" not in given_anyway
    schema.parse(Settings, {**found, "data": "x", "model": {"random": "tiny"}})


def test_a_run_on_a_changing_number_of_nodes_goes_on_with_as_few_workers_as_they_hold():
    scaled = dataclasses.replace(G6, least=0, most=4)
    assert settings_of({}, scaled)["minWorkers"] == 4, "one node at least, whatever minNodes is"
    assert settings_of({}, dataclasses.replace(scaled, least=2))["minWorkers"] == 8
    found = settings_of({"training": {"workers": 4}}, scaled)
    assert "minWorkers" not in found, "no fewer than it was told"
    assert settings_of({"training": {"minWorkers": None}}, scaled)["minWorkers"] is None, "a fixed size, where that is said"
    assert settings_of({"training": {"minWorkers": 12}}, scaled)["minWorkers"] == 12
    assert "minWorkers" not in settings_of({}), "nor where the number of nodes is fixed"
    with pytest.raises(BadInput, match=r"training.minWorkers = 12 is more than the 8 workers there are"):
        settings_of({"training": {"minWorkers": 12}})
    schema.parse(Settings, {**settings_of({}, scaled), "data": "x", "model": {"random": "tiny"}})


def test_fr29_more_workers_than_room_are_refused_with_the_numbers():
    with pytest.raises(BadInput, match=r"training.workers = 16, but 2 worker pods with 4 GPUs each hold 8"):
        settings_of({"training": {"workers": 16}})


def test_a_run_has_a_name_though_its_key_is_taken():
    found = settings_of({"training": {"runName": "my-run"}})
    assert found["run"] == "my-run"
    schema.parse(Settings, {**found, "data": "x", "model": {"random": "tiny"}})


def test_a_package_of_the_image_is_replaced_only_where_that_is_said():
    stack = config.load({"training": {"pip": ["torch==2.14", "einops"], "pipReplaces": ["torch"]}})
    assert stack.training.pip == ("torch==2.14", "einops")
    with pytest.raises(BadInput, match=r"would replace the image's ray, .* training.pipReplaces: \[ray\]"):
        config.load({"training": {"pip": ["ray"], "pipReplaces": ["torch"]}})


def test_the_local_stack_is_whole():
    values, region = config.read_stack_file(str(ROOT / "Pulumi.local.yaml"))
    stack = config.load(values, region)
    assert stack.cluster.kind == "existing"
    assert build.workers_of(stack, None).ranks == 2
    config.load({**values, "training": {**values["training"], "run": True}}, region)


REFUSED = {
    "no storage": ({"cluster": EXISTING, "training": {"run": True, "data": "x", "model": {"random": "tiny"}}}, "name storage.endpoint, storage.claimGiB"),
    "two kinds": ({"cluster": EXISTING, "storage": {"claimGiB": 5, "hostPath": "/x"}}, "claimGiB and hostPath exclude each other"),
    "a relative folder": ({"cluster": EXISTING, "storage": {"hostPath": "runs"}}, "no absolute folder"),
    "no URL": ({"cluster": EXISTING, "storage": {"endpoint": "minio:9000", "bucket": "abc"}}, "no URL of a store"),
    "no bucket": ({"cluster": EXISTING, "storage": {"endpoint": "http://minio:9000"}}, "endpoint needs bucket"),
    "a class alone": ({"cluster": EXISTING, "storage": {"storageClass": "nfs"}}, "no meaning without claimGiB"),
    "a folder on EKS": ({"storage": {"hostPath": "/x"}}, "storage.hostPath is for an existing cluster"),
    "workers on EKS": ({"ray": {"workers": 3}}, "it is gpu.nodes that counts"),
    "memory": ({"ray": {"workerMemory": "4GB"}}, "no amount of memory"),
    "a chart's key": ({"ray": {"charts": {"kuberay-operator": {"url": "x"}}}}, "a mapping of chart, repository, version, image"),
    "another torch": ({"training": {"pip": ["Torch==2.0"]}}, "would replace the image's torch"),
    "a deadline": ({"training": {"deadline": "soon"}}, "write 90m, 8h or 2d"),
    "no deadline": ({"training": {"deadline": "0m"}}, "write 90m, 8h or 2d"),
    "a number": ({"training": {"environment": {"A": 1}}}, "put numbers in quotes"),
    "a run's name": ({"training": {"runName": "My Run"}}, "training.runName = 'My Run' is no name of a run"),
    "what pip replaces": ({"training": {"pipReplaces": ["numpy"]}}, "training.pipReplaces = ['numpy']: a list of nvidia-nccl-cu12"),
    "half a page": ({"ray": {"hugePagesMiB": 5}}, "hugePagesMiB = 5 is no multiple of the page size, 2; use 6"),
    "an empty token": ({"huggingFaceToken": ""}, "pulumi config set --secret"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_is_refused_in_one_sentence(case):
    values, words = REFUSED[case]
    with pytest.raises(BadInput) as refusal:
        config.load(values)
    assert words in str(refusal.value)


def test_a_token_in_plain_text_is_refused_without_being_shown():
    values = {"ray-train-efa:huggingFaceToken": "hf_abc"}
    with pytest.raises(BadInput, match="plain text") as refusal:
        config.from_pulumi(values, encrypted=[])
    assert "hf_abc" not in str(refusal.value)
    assert "hf_abc" not in repr(config.from_pulumi(values, encrypted=list(values)))


# Preparing data first

PREPARING = {"sources": ["s3://bucket/text"], "tokenizer": "train:4096"}


def test_data_is_prepared_before_the_job_by_the_same_command_line():
    plain, prepared = job.ray_job(planned()), planned(prepare={"output": "s3://bucket/data", **PREPARING})
    document = job.ray_job(prepared)
    first = "sh -c 'python -m training.prepare --launcher ray --config prepare.json && exec python -m training.job --launcher ray --config settings.json'"
    assert document["entrypoint"] == f"timeout --signal=INT --kill-after=120 3600 {first}"
    assert json.loads(prepared.files["prepare.json"]) == {"output": "s3://bucket/data", **PREPARING}
    assert {"key": "prepare.json", "path": "prepare.json"} in document["submitterPodTemplate"]["spec"]["volumes"][0]["configMap"]["items"]
    assert "prepare" not in plain["entrypoint"]
    assert "prepare.json" not in planned().files


def training_of(**training):
    return config.load({"training": training}).training


@pytest.mark.parametrize(
    ("uri", "folder"), [("s3://bucket/runs", "s3://bucket/runs/data-{}"), ("s3://b/runs?region=x&scheme=http", "s3://b/runs/data-{}?region=x&scheme=http")]
)
def test_prepared_data_lies_beside_the_runs_under_a_name_that_its_settings_make(uri, folder):
    asked = training_of(prepare=PREPARING)
    made = build.prepare_of(asked, uri, None)
    assert made == {"output": folder.format(manifests.digest(PREPARING)), **PREPARING}
    assert made["output"] != build.prepare_of(training_of(prepare={**PREPARING, "sequenceLength": 2048}), uri, None)["output"]
    assert build.settings_of(config.load({}), asked, G6, uri)["data"] == made["output"]
    assert build.prepare_of(training_of(prepare={**PREPARING, "output": "/mine"}), uri, None)["output"] == "/mine"
    schema.parse(PrepareSettings, made)


def test_nothing_that_prepares_can_make_a_gpu_node_start():
    """Ray's autoscaler starts a node that has what a task asks for, and the GPU nodes do not have it."""
    stack = config.load({"gpu": {"minNodes": 0, "maxNodes": 4}, "system": {"nodes": 2}, "training": {"prepare": PREPARING}})
    pods = build.preparing_of(stack, on_eks=True)
    made = build.prepare_of(stack.training, "s3://bucket/runs", pods)
    workers, preparing = manifests.ray_cluster(cluster(workers=manifests.whole_node(48, 181.4, 4, 1, (0, 4)), preparing=pods))["workerGroupSpecs"]
    assert made["rayResource"] in preparing["resources"]
    assert "resources" not in workers
    assert not {"num-cpus", "num-gpus", "memory", "resources"} & set(preparing["rayStartParams"]), "KubeRay refuses resources in two places"
    assert preparing["rayStartParams"], "KubeRay writes the resources into it"
    assert (preparing["minReplicas"], preparing["maxReplicas"], "replicas" in preparing) == (0, 2, False), "none at rest, one a system node"
    spec = preparing["template"]["spec"]
    assert spec["nodeSelector"] == {config.ROLE_LABEL: "system"}
    assert "nvidia.com/gpu" not in json.dumps(spec)
    assert preparing["template"]["metadata"] == workers["template"]["metadata"], "the wait for the cluster knows its own pods by this"
    assert build.settings_of(stack, stack.training, manifests.whole_node(48, 181.4, 4, 1, (0, 4)), "s3://b/r")["device"] == "cuda", (
        "a job that starts without a GPU node would take itself for one on CPUs"
    )


@pytest.mark.parametrize("stack", [{}, {"gpu": {"nodes": 2}}, {"cluster": EXISTING}])
def test_gpu_nodes_that_bill_already_prepare_with_their_own_cpus(stack):
    found = config.load({**stack, "training": {"prepare": PREPARING}})
    assert build.preparing_of(found, on_eks=found.cluster.kind == "create") is None
    assert "rayResource" not in build.prepare_of(found.training, "/storage/runs", None)


@pytest.mark.parametrize(
    ("training", "told"),
    [
        ({"prepare": {"sources": ["x"]}}, "ray-train-efa:training.prepare.tokenizer is missing"),
        ({"prepare": {**PREPARING, "sorces": 1}}, "did you mean ray-train-efa:training.prepare.sources"),
        ({"prepare": {**PREPARING, "tokenizer": "train:3"}}, "write train:SIZE"),
        ({"prepare": "text"}, "ray-train-efa:training.prepare must be a mapping"),
        ({"prepare": PREPARING, "data": "s3://b/d"}, "data = 's3://b/d' and training.prepare exclude each other"),
    ],
)
def test_what_prepare_cannot_do_is_refused_before_any_resource(training, told):
    with pytest.raises(BadInput) as raised:
        config.load({"training": {"run": True, "model": {"random": "tiny"}, **training}})
    assert told in str(raised.value)
