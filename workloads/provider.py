"""The one connection to the Kubernetes API, and the namespace of everything of ours in there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pulumi
import pulumi_kubernetes as k8s
from pulumi import ResourceOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterAccessArgs:
    """kubeconfig: None for the user's own ($KUBECONFIG or ~/.kube/config), of which ``context`` is used. after: nodes, ways out, rights."""

    kubeconfig: pulumi.Input[str] | None
    context: str | None
    namespace: str
    after: Sequence[pulumi.Resource]


class ClusterAccess(pulumi.ComponentResource):
    """``provider`` for all Kubernetes objects; ``namespace`` of the operator, the Ray cluster and the job."""

    def __init__(self, name: str, args: ClusterAccessArgs) -> None:
        super().__init__("ray-train-efa:workloads:ClusterAccess", name, None)
        self.provider = k8s.Provider(
            name,
            kubeconfig=args.kubeconfig,
            context=args.context,
            # While a kubeconfig is unknown in a preview, only this keeps the plan from replacing every object.
            cluster_identifier=f"context {args.context}" if args.context else name,
            # This edge is every object's: what is in `after` exists before the first of them and outlives the last.
            opts=ResourceOptions(parent=self, depends_on=list(args.after)),
        )
        self.space = k8s.core.v1.Namespace(f"{name}-namespace", metadata={"name": args.namespace}, opts=ResourceOptions(parent=self, provider=self.provider))
        self.namespace: pulumi.Output[str] = self.space.metadata.apply(lambda made: str(made.name))
        self.register_outputs({})
