"""Who may do what: policy documents as pure functions, the nodes' role, and the roles that pods get through Pod Identity."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pulumi
import pulumi_aws as aws
from pulumi import ResourceOptions

from config import AUTOSCALER_SERVICE_ACCOUNT, NAMESPACE, TRAINING_SERVICE_ACCOUNT
from naming import Tags, named

# The least that AWS manages for nodes: join and describe, addresses for pods, pull images (not push).
NODE_POLICIES = ("AmazonEKSWorkerNodePolicy", "AmazonEKS_CNI_Policy", "AmazonEC2ContainerRegistryPullOnly")

Policy = dict[str, Any]


def document(*statements: dict[str, Any]) -> Policy:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def trust(service: str, actions: Sequence[str] = ("sts:AssumeRole",), condition: dict[str, Any] | None = None) -> Policy:
    statement: dict[str, Any] = {"Effect": "Allow", "Principal": {"Service": service}, "Action": list(actions)}
    return document({**statement, "Condition": condition} if condition else statement)


def pod_trust() -> Policy:
    """EKS hands the role to pods of the associated service account, with session tags that say which."""
    return trust("pods.eks.amazonaws.com", ("sts:AssumeRole", "sts:TagSession"))


def scheduler_trust(partition: str, region: str, account: str) -> Policy:
    """Only schedules of this account's default group: https://docs.aws.amazon.com/scheduler/latest/UserGuide/cross-service-confused-deputy-prevention.html"""
    group = f"arn:{partition}:scheduler:{region}:{account}:schedule-group/default"
    return trust("scheduler.amazonaws.com", condition={"StringEquals": {"aws:SourceAccount": account, "aws:SourceArn": group}})


def training_policy(bucket_arn: str, prefix: str) -> Policy:
    """Objects under the prefix, and the listing of it.

    The bare ListBucket is what HeadBucket needs, which carries no prefix; pyarrow asks it before it writes.
    """
    return document(
        {
            "Sid": "ListPrefix",
            "Effect": "Allow",
            "Action": ["s3:ListBucket"],
            "Resource": [bucket_arn],
            "Condition": {"StringLikeIfExists": {"s3:prefix": [prefix, f"{prefix}/*"]}},
        },
        {
            "Sid": "Objects",
            "Effect": "Allow",
            "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"],
            "Resource": [f"{bucket_arn}/{prefix}/*"],
        },
    )


def autoscaler_policy(partition: str, region: str, account: str, cluster: str) -> Policy:
    """https://github.com/kubernetes/autoscaler/blob/master/cluster-autoscaler/cloudprovider/aws/README.md; the Describe calls know no narrower resource."""
    return document(
        {
            "Sid": "Look",
            "Effect": "Allow",
            "Action": [
                "autoscaling:DescribeAutoScalingGroups",
                "autoscaling:DescribeAutoScalingInstances",
                "autoscaling:DescribeLaunchConfigurations",
                "autoscaling:DescribeScalingActivities",
                "autoscaling:DescribeTags",
                "ec2:DescribeImages",
                "ec2:DescribeInstanceTypes",
                "ec2:DescribeLaunchTemplateVersions",
                "ec2:GetInstanceTypesFromInstanceRequirements",
            ],
            "Resource": ["*"],
        },
        {
            "Sid": "Scale",
            "Effect": "Allow",
            "Action": ["autoscaling:SetDesiredCapacity", "autoscaling:TerminateInstanceInAutoScalingGroup"],
            "Resource": [f"arn:{partition}:autoscaling:{region}:{account}:autoScalingGroup:*:autoScalingGroupName/eks-*"],
            "Condition": {"StringEquals": {f"aws:ResourceTag/k8s.io/cluster-autoscaler/{cluster}": "owned"}},
        },
        {
            "Sid": "NodeGroups",
            "Effect": "Allow",
            "Action": ["eks:DescribeNodegroup"],
            "Resource": [f"arn:{partition}:eks:{region}:{account}:nodegroup/{cluster}/*"],
        },
    )


def stop_policy(partition: str, region: str, account: str, cluster: str, node_group: str) -> Policy:
    """Resizing one node group and nothing else; the last part of a node group's ARN is known only after its creation."""
    arn = f"arn:{partition}:eks:{region}:{account}:nodegroup/{cluster}/{node_group}/*"
    return document({"Sid": "StopGpuNodes", "Effect": "Allow", "Action": ["eks:UpdateNodegroupConfig"], "Resource": [arn]})


def tls_only_policy(bucket_arn: str) -> Policy:
    return document(
        {
            "Sid": "TlsOnly",
            "Effect": "Deny",
            "Principal": "*",
            "Action": "s3:*",
            "Resource": [bucket_arn, f"{bucket_arn}/*"],
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        }
    )


def role_with_managed(
    name: str, service: str, actions: Sequence[str], policies: Sequence[str], partition: str, tags: Tags, parent: pulumi.Resource
) -> tuple[aws.iam.Role, list[pulumi.Resource]]:
    """A role and the attachments of AWS-managed policies; whoever uses the role waits for both, for without them AWS neither sets up nor cleans up."""
    child = ResourceOptions(parent=parent)
    role = aws.iam.Role(name, assume_role_policy=json.dumps(trust(service, actions)), tags=named(tags, name), opts=child)
    attachments: list[pulumi.Resource] = [
        aws.iam.RolePolicyAttachment(f"{name}-{policy}", role=role.name, policy_arn=f"arn:{partition}:iam::aws:policy/{policy}", opts=child)
        for policy in policies
    ]
    return role, attachments


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeRoleArgs:
    partition: str
    tags: Tags


class NodeRole(pulumi.ComponentResource):
    """One role for all nodes: what differs between them is what their pods may do, and that is Pod Identity's."""

    def __init__(self, name: str, args: NodeRoleArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("ray-train-efa:infra:NodeRole", name, None, opts)
        self.role, self.attachments = role_with_managed(
            f"{name}-node", "ec2.amazonaws.com", ("sts:AssumeRole",), NODE_POLICIES, args.partition, args.tags, self
        )
        self.register_outputs({"roleArn": self.role.arn})


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdentityArgs:
    cluster_name: pulumi.Input[str]
    bucket_arn: pulumi.Input[str]
    prefix: str
    autoscaler_policy: Policy | None  # None: a fixed number of nodes, so no autoscaler
    tags: Tags


class Identity(pulumi.ComponentResource):
    """Pod Identity for the training service account and, where nodes are autoscaled, for the autoscaler; for nobody else."""

    def __init__(self, name: str, args: IdentityArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("ray-train-efa:infra:Identity", name, None, opts)
        training = pulumi.Output.from_input(args.bucket_arn).apply(lambda arn: json.dumps(training_policy(arn, args.prefix)))
        self.associations = [self._pod(name, "training", NAMESPACE, TRAINING_SERVICE_ACCOUNT, training, args)]
        if args.autoscaler_policy is not None:
            self.associations.append(self._pod(name, "autoscaler", *AUTOSCALER_SERVICE_ACCOUNT, json.dumps(args.autoscaler_policy), args))
        self.register_outputs({})

    def _pod(self, name: str, what: str, namespace: str, account: str, policy: pulumi.Input[str], args: IdentityArgs) -> pulumi.Resource:
        child = ResourceOptions(parent=self)
        role = aws.iam.Role(f"{name}-{what}", assume_role_policy=json.dumps(pod_trust()), tags=named(args.tags, f"{name}-{what}"), opts=child)
        granted = aws.iam.RolePolicy(f"{name}-{what}", role=role.name, policy=policy, opts=child)
        return aws.eks.PodIdentityAssociation(
            f"{name}-{what}",
            cluster_name=args.cluster_name,
            namespace=namespace,
            service_account=account,
            role_arn=role.arn,
            tags=args.tags,
            # Pods get the role when they start: it must be able to do something by then.
            opts=ResourceOptions(parent=self, depends_on=[granted]),
        )
