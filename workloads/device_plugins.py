"""The daemons that tell Kubernetes of a node's GPUs and EFA interfaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pulumi
import pulumi_kubernetes as k8s
from pulumi import ResourceOptions

from workloads import charts

EFA, NVIDIA = "aws-efa-k8s-device-plugin", "nvidia-device-plugin"
# Of one call of Helm's to a slow API server.
TIMEOUT_SECONDS = 600


def release(name: str, source: charts.Source, release_name: str, namespace: pulumi.Input[str], values: Mapping[str, Any], opts: ResourceOptions) -> Any:
    """A Helm release, not waited for: Helm takes a DaemonSet that wants no pods for ready, and gives no cause for one that is not.

    What is needed of it is looked for where it is needed (watch.py).
    """
    return k8s.helm.v3.Release(
        name,
        name=release_name,
        chart=source.chart,
        version=source.version,
        repository_opts={"repo": source.repository} if source.repository else None,
        namespace=namespace,
        values=dict(values),
        skip_await=True,
        timeout=TIMEOUT_SECONDS,
        opts=opts,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicePluginsArgs:
    instance_type: str
    region: str
    efa: bool
    overrides: Mapping[str, Any] | None


class DevicePlugins(pulumi.ComponentResource):
    """``releases``: the NVIDIA plugin and, where the nodes have EFA, its plugin. In kube-system: they are node-critical."""

    def __init__(self, name: str, args: DevicePluginsArgs, opts: ResourceOptions) -> None:
        super().__init__("ray-train-efa:workloads:DevicePlugins", name, None, opts)
        child = ResourceOptions(parent=self)
        nvidia = charts.source(NVIDIA, args.overrides)
        self.releases = [release(f"{name}-nvidia", nvidia, NVIDIA, "kube-system", charts.nvidia_plugin(nvidia.image), child)]
        if args.efa:
            efa = charts.source(EFA, args.overrides)
            values = charts.efa_plugin(args.instance_type, args.region, efa.image)
            self.releases.append(release(f"{name}-efa", efa, EFA, "kube-system", values, child))
        self.register_outputs({})
