"""Puts the Kubernetes half together: device plugins, operator, Ray cluster, training job, in order of creation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pulumi
from pulumi import ResourceOptions

import config
from workloads import diagnosis, job, manifests, watch
from workloads.autoscaler import Autoscaler, AutoscalerArgs
from workloads.device_plugins import DevicePlugins, DevicePluginsArgs
from workloads.kuberay import Operator, OperatorArgs, crd_update, pod_labels
from workloads.provider import ClusterAccess, ClusterAccessArgs
from workloads.ray_cluster import RayCluster, RayClusterArgs
from workloads.storage import RunStorage, run_storage
from workloads.training_job import TrainingJob, TrainingJobArgs

TRAINING = Path(__file__).parents[1] / "training"
# RayCluster names end at 53 characters, and the operator's release is named after it.
LONGEST_NAME = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
    """The EKS cluster to run on. ready: what every Kubernetes object waits for, and what outlives it. storage_uri: where runs go."""

    kubeconfig: pulumi.Output[str]
    storage_uri: pulumi.Output[str]
    region: str
    instance_type: str
    vcpus: int
    allocatable_gib: float
    gpus: int
    efa: int
    ready: Sequence[pulumi.Resource]


def workers_of(stack: config.Stack, nodes: Nodes | None) -> manifests.Workers:
    """One pod a GPU node on EKS; on an existing cluster as many as the stack says."""
    if nodes is not None:
        return manifests.whole_node(nodes.vcpus, nodes.allocatable_gib, nodes.gpus, nodes.efa, stack.gpu.size)
    pods = stack.ray.workers or 1
    return manifests.Workers(least=pods, most=pods, cpu=stack.ray.worker_cpu, memory=stack.ray.worker_memory)


def preparing_of(stack: config.Stack, on_eks: bool) -> manifests.Workers | None:
    """The pods that prepare data while there are no GPU nodes yet. Where their number is fixed they bill already, and their own CPUs do it sooner."""
    if not on_eks or stack.training.prepare is None or not stack.gpu.autoscaled:
        return None
    return manifests.Workers(least=0, most=stack.system.nodes, cpu=stack.ray.worker_cpu, memory=stack.ray.worker_memory)


def prepare_of(training: config.Training, uri: str, preparing: manifests.Workers | None) -> dict[str, Any] | None:
    """Prepare's settings: where its output goes and where its tasks run, under what the stack says. uri: where runs go."""
    if training.prepare is None:
        return None
    folder, mark, query = uri.partition("?")
    # Other settings are other data, and finished data is never overwritten.
    output = f"{folder.rstrip('/')}/data-{manifests.digest(dict(training.prepare))}{mark}{query}"
    return {"output": output, **({"rayResource": manifests.PREPARE_RESOURCE} if preparing else {}), **training.prepare}


def settings_of(stack: config.Stack, training: config.Training, workers: manifests.Workers, uri: str) -> dict[str, Any]:
    """The job's settings: what the cluster decides, under what the stack says. Raises BadInput for more workers than there is room for."""
    known: dict[str, Any] = {"workers": workers.ranks, "storage": uri}
    prepared = prepare_of(training, uri, None)
    if prepared is not None:
        known["data"] = prepared["output"]
    if workers.gpus and not workers.least:
        known["device"] = "cuda"  # no GPU is there yet when the job looks for one
    if training.transport == "efa" and workers.efa:
        known["nicsPerHost"] = workers.efa
    found = {**known, **training.settings}
    if "minWorkers" not in found and workers.fewest_ranks < found["workers"]:
        found["minWorkers"] = workers.fewest_ranks  # nodes come and go between the two, and the run with them
    if (found.get("minWorkers") or 0) > found["workers"]:
        raise config.BadInput(
            f"{config.PROJECT}:training.minWorkers = {found['minWorkers']} is more than the {found['workers']} workers there are; lower it, or add nodes"
        )
    if found["workers"] > workers.ranks:
        each = f"{workers.gpus} GPUs" if workers.gpus else "room for 1"
        raise config.BadInput(
            f"{config.PROJECT}:training.workers = {found['workers']}, but {workers.most} worker pods with {each} each hold {workers.ranks};"
            " lower it, or add nodes (gpu.nodes; ray.workers on an existing cluster)"
        )
    return found


def build(stack: config.Stack, name: str, nodes: Nodes | None, secrets: Mapping[str, pulumi.Output[str] | None]) -> dict[str, pulumi.Input[object]]:
    """Registers everything that Kubernetes runs and returns the outputs. nodes: None on an existing cluster. Raises BadInput."""
    if len(name) > LONGEST_NAME:
        raise config.BadInput(f"{name!r} is longer than {LONGEST_NAME} characters; choose a shorter stack name")
    on_eks = nodes is not None
    workers = workers_of(stack, nodes)
    storage = RunStorage(uri="") if on_eks else run_storage(stack)
    code = job.source_files(TRAINING)
    if storage.keys and not (secrets.get("s3AccessKeyId") is not None and secrets.get("s3SecretAccessKey") is not None):
        raise config.BadInput(f"{config.PROJECT}:storage.endpoint needs keys: pulumi config set --secret s3AccessKeyId, and the same for s3SecretAccessKey")
    if stack.training.run:
        settings_of(stack, stack.training, workers, "")  # refused before any Kubernetes object

    # On a cluster of our own the namespace is fixed: the rights to the bucket are bound to it.
    where = config.NAMESPACE if on_eks else name
    access = ClusterAccess(
        f"{name}-kubernetes",
        ClusterAccessArgs(kubeconfig=nodes.kubeconfig if nodes else None, context=stack.cluster.context, namespace=where, after=nodes.ready if nodes else []),
    )
    shared, inside = ResourceOptions(provider=access.provider), access.namespace
    after: list[pulumi.Resource] = []
    if nodes is not None:
        args = DevicePluginsArgs(instance_type=nodes.instance_type, region=nodes.region, efa=nodes.efa > 0, overrides=stack.ray.charts)
        after += DevicePlugins(f"{name}-plugins", args, shared).releases
        if workers.least != workers.most:
            scaler = AutoscalerArgs(cluster=name, region=nodes.region, idle_minutes=stack.budget.idle_stop_minutes, overrides=stack.ray.charts)
            after.append(Autoscaler(f"{name}-autoscaler", scaler, shared).release)
    operator = Operator(
        f"{name}-operator", OperatorArgs(stack=name, namespace=inside, on_eks=on_eks, overrides=stack.ray.charts, after=[*after, access.space]), shared
    )
    cluster = RayCluster(
        f"{name}-ray",
        RayClusterArgs(
            cluster=manifests.Cluster(
                name=name,
                image=stack.image,
                head_cpu=stack.ray.head_cpu,
                head_memory=stack.ray.head_memory,
                workers=workers,
                environment=config.nccl_environment(),
                storage=storage,
                on_eks=on_eks,
                hub_token=secrets.get("huggingFaceToken") is not None,
                huge_pages_mib=stack.ray.huge_pages_mib,
                lock_memory=stack.ray.lock_memory,
                preparing=preparing_of(stack, on_eks),
            ),
            namespace=inside,
            operator_labels=pod_labels(name),
            secrets=secrets,
            devices=diagnosis.Devices(nodes=workers.least, gpus=workers.gpus, efa=workers.efa) if on_eks else None,
            watched=watch.Watched(kubeconfig=nodes.kubeconfig if nodes else None, context=stack.cluster.context),
            crd_update=crd_update(stack.ray.charts),
            after=[*after, operator.release],
        ),
        shared,
    )
    outputs: dict[str, pulumi.Input[object]] = {"namespace": inside, "rayCluster": name}
    if stack.training.run:
        uri = nodes.storage_uri if nodes else pulumi.Output.from_input(storage.uri)
        planned = uri.apply(lambda known: _job(stack, name, cluster.pods, workers, known, code, on_eks))
        run = TrainingJob(f"{name}-training", TrainingJobArgs(job=planned, namespace=inside, after=[cluster.ready]), shared)
        outputs["trainingJob"] = run.name
    return outputs


def _job(stack: config.Stack, name: str, pods: str, workers: manifests.Workers, uri: str, code: Mapping[str, str], on_eks: bool) -> job.Job:
    training = stack.training
    return job.Job(
        cluster=name,
        pods=pods,
        image=stack.image,
        ranks=workers.ranks,
        settings=settings_of(stack, training, workers, uri),
        code=code,
        # The network is pinned for the job, and not for the cluster: another transport is another run, not other pods.
        environment={**config.nccl_environment(training.transport), **training.environment},
        pip=training.pip,
        deadline=int(training.deadline.total_seconds()),
        on_eks=on_eks,
        prepare=prepare_of(training, uri, preparing_of(stack, on_eks)),
    )
