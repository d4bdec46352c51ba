"""Cluster Autoscaler: GPU nodes come when Ray's workers wait for them, and go when they are idle."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi import ResourceOptions

import config
from workloads import charts, manifests
from workloads.device_plugins import release

CHART = "cluster-autoscaler"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoscalerArgs:
    """cluster: the EKS cluster's name, which the tags of its groups carry."""

    cluster: str
    region: str
    idle_minutes: int | None
    overrides: Mapping[str, Any] | None


class Autoscaler(pulumi.ComponentResource):
    """``release``: only where the number of nodes is not fixed."""

    def __init__(self, name: str, args: AutoscalerArgs, opts: ResourceOptions) -> None:
        super().__init__("ray-train-efa:workloads:Autoscaler", name, None, opts)
        namespace, _ = config.AUTOSCALER_SERVICE_ACCOUNT
        source = charts.source(CHART, args.overrides)
        values = charts.cluster_autoscaler(args.cluster, args.region, manifests.system_nodes(True), args.idle_minutes, source.image)
        self.release = release(f"{name}-chart", source, CHART, namespace, values, ResourceOptions(parent=self))
        self.register_outputs({})
