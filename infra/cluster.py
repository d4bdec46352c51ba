"""The EKS control plane, its log group, and the add-ons that nodes need before they come."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
import pulumi_aws as aws
import pulumi_eks as eks
from pulumi import ResourceOptions

from infra.identity import role_with_managed
from naming import Tags, named
from versions import NODE_ADDONS as NODE_ADDONS

ADDON_VALUES = {"vpc-cni": {"enableNetworkPolicy": "true"}}
ADMIN_POLICY = "arn:{partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"


def admin_entries(arns: Sequence[str], partition: str) -> dict[str, Any]:
    """Access entries under names that stay when the list is reordered."""
    policy = eks.AccessPolicyAssociationArgs(
        policy_arn=ADMIN_POLICY.format(partition=partition), access_scope=aws.eks.AccessPolicyAssociationAccessScopeArgs(type="cluster")
    )
    return {
        hashlib.sha256(arn.encode()).hexdigest()[:8]: eks.AccessEntryArgs(principal_arn=arn, access_policies={"admin": policy}) for arn in sorted(set(arns))
    }


def addon(
    name: str, cluster_name: pulumi.Input[str], addon_name: str, pins: Mapping[str, str], tags: Tags, parent: pulumi.Resource, after: Sequence[pulumi.Resource]
) -> aws.eks.Addon:
    """An EKS add-on: the pinned version, or the one that EKS takes at creation and that then stays."""
    values = ADDON_VALUES.get(addon_name)
    return aws.eks.Addon(
        f"{name}-{addon_name}",
        cluster_name=cluster_name,
        addon_name=addon_name,
        addon_version=pins.get(addon_name),
        configuration_values=json.dumps(values, sort_keys=True) if values else None,
        resolve_conflicts_on_create="OVERWRITE",
        resolve_conflicts_on_update="OVERWRITE",
        tags=named(tags, f"{name}-{addon_name}"),
        opts=ResourceOptions(parent=parent, depends_on=list(after)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlPlaneArgs:
    vpc_id: pulumi.Input[str]
    subnet_ids: Sequence[pulumi.Input[str]]
    kubernetes_version: str
    public_access_cidrs: Sequence[str]
    admins: Sequence[str]
    secrets_key_arn: str | None
    logs: Sequence[str]
    log_retention_days: int
    addon_pins: Mapping[str, str]
    partition: str
    tags: Tags


class ControlPlane(pulumi.ComponentResource):
    """``addons``: node groups wait for them, and so go before them."""

    def __init__(self, name: str, args: ControlPlaneArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("ray-train-efa:infra:ControlPlane", name, None, opts)
        role, attachments = role_with_managed(
            f"{name}-control-plane", "eks.amazonaws.com", ("sts:AssumeRole", "sts:TagSession"), ("AmazonEKSClusterPolicy",), args.partition, args.tags, self
        )
        # EKS would make it itself, without an end, and leave it. Before the cluster, so that it goes after it: late log lines would bring it back.
        logs = aws.cloudwatch.LogGroup(
            f"{name}-logs",
            name=f"/aws/eks/{name}/cluster",
            retention_in_days=args.log_retention_days,
            tags=named(args.tags, f"{name}-logs"),
            opts=ResourceOptions(parent=self),
        )
        self.eks = eks.Cluster(
            name,
            name=name,
            version=args.kubernetes_version,
            vpc_id=args.vpc_id,
            subnet_ids=list(args.subnet_ids),
            service_role=role,
            authentication_mode=eks.AuthenticationMode.API,
            access_entries=admin_entries(args.admins, args.partition),
            endpoint_private_access=True,
            endpoint_public_access=True,  # said aloud, for only then the component waits until the API server answers
            public_access_cidrs=list(args.public_access_cidrs),
            enabled_cluster_log_types=list(args.logs),
            encryption_config_key_arn=args.secrets_key_arn,
            upgrade_policy=aws.eks.ClusterUpgradePolicyArgs(support_type="STANDARD"),  # the default would go on to the six-fold price of extended support
            skip_default_node_group=True,
            skip_default_security_groups=True,  # managed node groups use the group that EKS makes; unused ones only block destroy
            # The component looks the newest add-on versions up at each `up`; ours below stay as they were created.
            use_default_vpc_cni=True,
            kube_proxy_addon_options=eks.KubeProxyAddonOptionsArgs(enabled=False),
            coredns_addon_options=eks.CoreDnsAddonOptionsArgs(enabled=False),
            bootstrap_self_managed_addons=False,  # else copies that no one manages come first
            tags=dict(args.tags),
            # EKS neither makes nor cleans up its interfaces without the policy.
            opts=ResourceOptions(parent=self, depends_on=[*attachments, logs]),
        )
        self.name = self.eks.eks_cluster.name
        self.security_group_id = self.eks.eks_cluster.vpc_config.cluster_security_group_id
        self.addons = [addon(name, self.name, wanted, args.addon_pins, args.tags, self, [self.eks]) for wanted in NODE_ADDONS]
        self.register_outputs({"name": self.name})
