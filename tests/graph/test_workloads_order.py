"""The Kubernetes half under mocks: what is registered, in which order it comes and goes, and what stays secret."""

from __future__ import annotations

import functools
import itertools
import json

import pulumi
import pytest
import recorder

import versions

CLUSTER, JOB, RELEASE = "kubernetes:ray.io/v1:RayCluster", "kubernetes:ray.io/v1:RayJob", "kubernetes:helm.sh/v3:Release"
NAMESPACE, CONFIGMAP, SECRET = "kubernetes:core/v1:Namespace", "kubernetes:core/v1:ConfigMap", "kubernetes:core/v1:Secret"
PROVIDER, POLICY, ACCOUNT = "pulumi:providers:kubernetes", "kubernetes:networking.k8s.io/v1:NetworkPolicy", "kubernetes:core/v1:ServiceAccount"
CLAIM = "kubernetes:core/v1:PersistentVolumeClaim"
RUN = {"run": True, "data": "s3://data/x", "model": {"random": "tiny"}}
EXISTING = {"cluster": {"kind": "existing", "context": "kind-lab"}, "storage": {"hostPath": "/var/lib/runs"}}


def built(settings=None, **how):
    graph = recorder.run(settings, **how)
    assert graph.error is None, str(graph.error)
    return graph


@functools.cache
def on_eks():
    return built({"training": RUN})


@functools.cache
def existing():
    return built({**EXISTING, "training": RUN})


def secret(value):
    return isinstance(value, dict) and value.get("4dabf18193072939515e22adb298388d") == "1b47061264138c4ac30d75fd1eb44270"


def test_fr12_destroy_goes_from_the_job_to_the_cluster_to_the_operator_to_the_plugins_to_the_nodes():
    graph = on_eks()
    operator, nvidia, efa = (graph.one(RELEASE, name) for name in ("operator-chart", "plugins-nvidia", "plugins-efa"))
    chain = [[graph.one(JOB)], [graph.one(CLUSTER)], [operator], [nvidia, efa], graph.of(recorder.GROUP)]
    for users, used in itertools.pairwise(chain):
        for user in users:
            graph.waits(user, used)
        assert min(graph.wave(node) for node in users) > max(graph.wave(node) for node in used)


def test_everything_in_kubernetes_waits_for_the_nodes_and_goes_before_them():
    graph = on_eks()
    groups = graph.of(recorder.GROUP)
    objects = [node for node in graph.nodes.values() if node.type.startswith("kubernetes:")]
    assert len(objects) >= 9
    for node in objects:
        provider_urn = node.request.provider.rpartition("::")[0] or node.request.provider
        assert provider_urn == graph.one(PROVIDER).urn, f"{node.name} has another provider"
    graph.waits(graph.one(PROVIDER), [*groups, *graph.of(recorder.ASSOCIATION), *graph.of(recorder.NAT)])


def test_the_namespace_outlives_what_is_in_it():
    for graph in (on_eks(), existing()):
        namespace = graph.one(NAMESPACE)
        for kind in (JOB, CLUSTER, CONFIGMAP, ACCOUNT, POLICY):
            graph.waits(graph.one(kind, "training-code" if kind == CONFIGMAP else ""), [namespace])
        graph.waits(graph.one(RELEASE, "operator"), [namespace])


def test_the_door_is_shut_before_the_first_pod_comes():
    for graph in (on_eks(), existing()):
        graph.waits(graph.one(CLUSTER), [graph.one(POLICY), graph.one(ACCOUNT)])


def test_an_existing_cluster_gets_no_plugins_and_a_namespace_named_after_the_stack():
    graph = existing()
    assert [node.name for node in graph.of(RELEASE)] == ["ray-train-efa-dev-operator-chart"]
    assert graph.one(NAMESPACE).inputs["metadata"]["name"] == "ray-train-efa-dev"
    assert graph.one(PROVIDER).inputs["context"] == "kind-lab"
    assert "kubeconfig" not in graph.one(PROVIDER).inputs, "the user's own is read where the provider runs, and not stored"


def test_on_eks_the_pods_have_the_identity_that_the_bucket_knows():
    graph = on_eks()
    association = graph.one(recorder.ASSOCIATION, "training").inputs
    assert association["namespace"] == graph.one(NAMESPACE).inputs["metadata"]["name"]
    assert association["serviceAccount"] == graph.one(ACCOUNT).inputs["metadata"]["name"]
    spec = graph.one(CLUSTER).inputs["spec"]
    for pod in (spec["headGroupSpec"]["template"]["spec"], spec["workerGroupSpecs"][0]["template"]["spec"]):
        assert pod["serviceAccountName"] == association["serviceAccount"]


@pytest.mark.parametrize("shape", recorder.SHAPES)
def test_workers_have_every_gpu_and_every_efa_device_of_their_node(shape):
    graph = built({"gpu": {"instanceType": shape, "nodes": 2}})
    vcpus, gib, gpus, _, efa, _, _ = recorder.INSTANCES[shape]
    limits = graph.one(CLUSTER).inputs["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"]
    assert limits["limits"]["nvidia.com/gpu"] == gpus
    assert limits["limits"]["vpc.amazonaws.com/efa"] <= efa
    assert int(limits["requests"]["cpu"]) < vcpus
    assert int(limits["limits"]["memory"].removesuffix("Gi")) < gib


def test_every_chart_is_pinned_and_named():
    for node in on_eks().of(RELEASE):
        chart = node.inputs["chart"]
        assert (node.inputs["repositoryOpts"]["repo"], node.inputs["version"]) == versions.CHARTS[chart]
        assert node.inputs["name"]
        assert node.inputs["namespace"]
        assert node.inputs["timeout"] >= 600
        assert node.inputs["skipAwait"] is True, "what it brings is looked for where it is needed, by those who can tell the cause"


def hooks(node, kind):
    return list(getattr(node.request.hooks, kind)) if node.request else []


def test_the_job_waits_for_a_cluster_that_was_seen_working_and_nobody_waits_for_the_job():
    for graph in (on_eks(), existing()):
        ready = graph.one(CONFIGMAP, "ray-ready")
        assert hooks(ready, "before_create") == hooks(ready, "before_update") == ["ray-train-efa-dev-ray-ready"]
        graph.waits(ready, [graph.one(CLUSTER)])
        graph.waits(graph.one(JOB), [ready])
        assert "annotations" not in graph.one(CLUSTER).inputs["metadata"], "the engine's own wait takes an old status for a new one"
        assert "annotations" not in graph.one(JOB).inputs["metadata"], "`up` does not wait for the end of the training"


def test_what_is_waited_for_changes_with_the_cluster_and_with_nothing_else():
    def seen(settings):
        return built(settings).one(CONFIGMAP, "ray-ready").inputs["metadata"]["annotations"]

    before = seen(EXISTING)
    assert seen({**EXISTING, "training": RUN}) == before
    assert seen({**EXISTING, "ray": {"workers": 2}}) != before
    assert seen({**EXISTING, "ray": {"image": "other/image:1"}}) != before


def test_on_eks_the_devices_are_looked_at_before_the_cluster_is_made_or_changed():
    cluster = on_eks().one(CLUSTER)
    assert hooks(cluster, "before_create") == hooks(cluster, "before_update") == ["ray-train-efa-dev-ray-crd", "ray-train-efa-dev-ray-devices"]
    folder = existing().one(CLUSTER)
    assert hooks(folder, "before_create") == hooks(folder, "before_update") == ["ray-train-efa-dev-ray-crd", "ray-train-efa-dev-ray-one-node"], (
        "CPU workers have no devices"
    )
    claim = built({"cluster": EXISTING["cluster"], "storage": {"claimGiB": 10}})
    assert hooks(claim.one(CLUSTER), "before_create") == ["ray-train-efa-dev-ray-crd"]
    kinds = ("before_delete", "after_delete")
    assert not [node.name for node in on_eks().nodes.values() for kind in kinds if hooks(node, kind)], "destroy does not run the program"


def test_new_pods_are_a_new_job_for_they_end_the_old_one():
    more = built({**EXISTING, "training": RUN, "ray": {"headMemory": "9Gi"}})
    assert more.outputs["trainingJob"] != existing().outputs["trainingJob"]


def test_an_autoscaler_comes_with_an_open_number_of_nodes_and_acts_with_the_rights_of_its_account():
    assert not [node for node in on_eks().of(RELEASE) if "autoscaler" in node.name]
    assert not [node for node in built({"gpu": {"minNodes": 2, "maxNodes": 2}}).of(RELEASE) if "autoscaler" in node.name]
    graph = built({"gpu": {"minNodes": 0, "maxNodes": 4}, "budget": {"idleStopMinutes": 15}})
    scaler, association = graph.one(RELEASE, "autoscaler"), graph.one(recorder.ASSOCIATION, "autoscaler")
    values = scaler.inputs["values"]
    assert (scaler.inputs["namespace"], values["rbac"]["serviceAccount"]["name"]) == (association.inputs["namespace"], association.inputs["serviceAccount"])
    assert values["autoDiscovery"]["clusterName"] == graph.one(recorder.CLUSTER).name
    assert values["extraArgs"]["scale-down-unneeded-time"] == "14m", "Ray takes a minute of the fifteen"
    graph.waits(scaler, [*graph.of(recorder.GROUP), association])
    graph.waits(graph.one(CLUSTER), [scaler])
    spec = graph.one(CLUSTER).inputs["spec"]
    assert (spec["enableInTreeAutoscaling"], spec["autoscalerOptions"]["idleTimeoutSeconds"]) == (True, 60)
    assert [spec["workerGroupSpecs"][0][key] for key in ("minReplicas", "maxReplicas")] == [0, 4]


def test_a_first_up_trains_nothing():
    graph = built(EXISTING)
    assert graph.of(JOB) == []
    assert [node.name for node in graph.of(CONFIGMAP)] == ["ray-train-efa-dev-ray-ready"]


def test_the_same_stack_gives_the_same_job_and_a_changed_one_another():
    assert built({**EXISTING, "training": RUN}).one(JOB).inputs == existing().one(JOB).inputs
    other = built({**EXISTING, "training": {**RUN, "steps": 70}})
    assert other.outputs["trainingJob"] != existing().outputs["trainingJob"]
    assert other.one(CLUSTER).inputs == existing().one(CLUSTER).inputs, "other settings leave the pods alone"
    transport = built({**EXISTING, "training": {**RUN, "transport": "tcp"}})
    assert transport.one(CLUSTER).inputs == existing().one(CLUSTER).inputs, "another transport leaves the pods alone"


def test_an_old_job_has_stopped_before_the_new_one_starts():
    node = existing().one(JOB)
    assert node.request.deleteBeforeReplace


def test_the_code_is_immutable_and_there_before_the_job():
    graph = existing()
    code = graph.one(CONFIGMAP, "training-code")
    assert code.inputs["immutable"] is True
    assert code.inputs["data"]["training--job.py"].startswith('"""The training job')
    graph.waits(graph.one(JOB), [code])
    assert code.inputs["metadata"]["name"] == graph.one(JOB).inputs["spec"]["submitterPodTemplate"]["spec"]["volumes"][0]["configMap"]["name"]


def test_on_eks_runs_go_to_the_stacks_bucket():
    graph = on_eks()
    settings = json.loads(graph.one(CONFIGMAP, "training-code").inputs["data"]["settings.json"])
    assert settings["storage"].startswith("s3://")
    assert settings["storage"].endswith("/runs")
    assert settings["workers"] == 8


def test_a_preview_of_an_empty_account_shows_the_whole():
    graph = built({"training": RUN}, preview=True)
    assert graph.one(JOB)
    assert graph.one(CLUSTER)


def test_more_workers_than_room_are_refused_before_the_first_kubernetes_object():
    graph = recorder.run({**EXISTING, "training": {**RUN, "workers": 3}})
    assert "training.workers = 3, but 1 worker pods with room for 1 each hold 1" in str(graph.error)
    assert graph.nodes == {}


def test_a_store_without_keys_is_refused_by_name():
    store = {"endpoint": "http://minio:9000", "bucket": "models"}
    graph = recorder.run({"cluster": EXISTING["cluster"], "storage": store})
    assert "pulumi config set --secret s3AccessKeyId" in str(graph.error)
    assert graph.nodes == {}


def test_secrets_are_secrets_wherever_they_go(monkeypatch):
    monkeypatch.setattr(pulumi.runtime.config, "is_config_secret", lambda key: True)
    store = {"endpoint": "http://minio:9000", "bucket": "models"}
    tokens = {"huggingFaceToken": "hf_very_secret", "s3AccessKeyId": "AKIASECRET", "s3SecretAccessKey": "also_secret"}
    graph = built({"cluster": EXISTING["cluster"], "storage": store, **tokens})
    for node in graph.of(SECRET):
        assert secret(node.inputs["stringData"]), f"{node.name} would be plain in the state"
    assert len(graph.of(SECRET)) == 2
    graph.waits(graph.one(CLUSTER), graph.of(SECRET))
    elsewhere = json.dumps([node.inputs for node in graph.nodes.values() if node.type != SECRET]) + str(graph.outputs) + str(graph.logs)
    assert not [token for token in tokens.values() if token in elsewhere]


def test_a_claim_is_not_waited_for_as_its_volume_may_come_with_the_first_pod():
    graph = built({"cluster": EXISTING["cluster"], "storage": {"claimGiB": 10}})
    assert graph.one(CLAIM).inputs["metadata"]["annotations"] == {"pulumi.com/skipAwait": "true"}
    graph.waits(graph.one(CLUSTER), [graph.one(CLAIM)])
