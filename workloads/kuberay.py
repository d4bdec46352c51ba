"""The KubeRay operator, for our namespace alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
from pulumi import ResourceOptions

from workloads import charts, manifests
from workloads.device_plugins import release

CHART = "kuberay-operator"


def release_name(name: str) -> str:
    return f"{name}-kuberay"


def pod_labels(name: str) -> dict[str, str]:
    """The labels of the operator's pods (the chart's templates/_helpers.tpl)."""
    return {"app.kubernetes.io/name": CHART, "app.kubernetes.io/instance": release_name(name)}


def crd_update(overrides: Mapping[str, Any] | None) -> str:
    """The command that brings the CRDs to the chart's version, which Helm never does."""
    source = charts.source(CHART, overrides)
    where = f" --repo {source.repository}" if source.repository else ""
    version = f" --version {source.version}" if source.version else ""
    return f"helm show crds {source.chart}{where}{version} | kubectl apply --server-side --force-conflicts -f -"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorArgs:
    stack: str
    namespace: pulumi.Input[str]
    on_eks: bool
    overrides: Mapping[str, Any] | None
    after: Sequence[pulumi.Resource]


class Operator(pulumi.ComponentResource):
    """``release``: the chart with its CRDs, which Helm installs where they are missing and never changes or deletes."""

    def __init__(self, name: str, args: OperatorArgs, opts: ResourceOptions) -> None:
        super().__init__("ray-train-efa:workloads:Operator", name, None, opts)
        source = charts.source(CHART, args.overrides)
        named = release_name(args.stack)
        values = charts.kuberay(named, manifests.system_nodes(args.on_eks), source.image)
        # Destroy order: the plugins outlive the operator, which outlives what it must clean up after.
        self.release = release(f"{name}-chart", source, named, args.namespace, values, ResourceOptions(parent=self, depends_on=list(args.after)))
        self.register_outputs({})
