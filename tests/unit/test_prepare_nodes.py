"""Which nodes Ray's own autoscaler starts for the tasks of `prepare`, on the Ray cluster that a stack gets."""

from __future__ import annotations

from collections import Counter

import pytest
from ray.autoscaler._private.kuberay.autoscaling_config import _generate_available_node_types_from_ray_cr_spec
from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil

from workloads import manifests, storage


def started(demand: dict[str, float], tasks: int) -> Counter[str]:
    """The nodes that the autoscaler starts for so many tasks, on an EKS stack whose GPU nodes start on demand, with two system nodes."""
    cluster = manifests.Cluster(
        name="demo",
        image="repo/image:1",
        head_cpu=2,
        head_memory="8Gi",
        workers=manifests.whole_node(48, 181.4, 4, 1, (0, 4)),
        environment={},
        storage=storage.RunStorage(uri="s3://bucket/runs"),
        on_eks=True,
        preparing=manifests.Workers(least=0, most=2, cpu=1, memory="4Gi"),
    )
    kinds = _generate_available_node_types_from_ray_cr_spec(manifests.ray_cluster(cluster))
    nodes = {
        name: NodeTypeConfig(name=name, min_worker_nodes=kind["min_workers"], max_worker_nodes=kind["max_workers"], resources=kind["resources"])
        for name, kind in kinds.items()
        if "head" not in name
    }
    asked = ResourceRequestUtil.group_by_count([ResourceRequestUtil.make(demand)] * tasks)
    request = SchedulingRequest(disable_launch_config_check=True, node_type_configs=nodes, max_num_nodes=10, resource_requests=asked)
    return Counter({launch.instance_type: launch.count for launch in ResourceDemandScheduler(lambda *_: None).schedule(request).to_launch})


@pytest.mark.parametrize("tasks", [1, 4, 400])
def test_tasks_that_prepare_start_cpu_nodes_alone_however_many_wait(tasks: int) -> None:
    assert started({"CPU": 1, manifests.PREPARE_RESOURCE: 1}, tasks) == {"preparing": min(tasks, 2)}


def test_without_the_resource_waiting_tasks_would_start_gpu_nodes() -> None:
    """What the resource is for; should Ray change this, it is not needed any more."""
    assert started({"CPU": 1}, 400)["workers"] > 0
