"""The bucket for runs and checkpoints, and an FSx for Lustre file system where one is asked for."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pulumi
import pulumi_aws as aws
from pulumi import ResourceOptions

import config
from infra.identity import tls_only_policy
from naming import Tags, named

# Lustre's own ports: https://docs.aws.amazon.com/fsx/latest/LustreGuide/limit-access-security-groups.html
LUSTRE_PORTS = ((988, 988), (1018, 1023))
AFTER_DESTROY = {
    "keep": "stays with everything in it, at about ${price:g} per GB-month; delete it with: aws s3 rb --force s3://{bucket}",
    "delete": "is emptied and deleted with the stack",
    "protect": "refuses the destroy of the stack; set storage.onDestroy to keep or delete and `pulumi up` first",
    "existing": "is not this stack's and stays untouched",
}


def lifecycle_rules(prefix: str, checkpoint_days: int | None) -> list[dict[str, Any]]:
    """Parts of uploads that never ended are billed and unseen; replaced versions are kept a week for mistakes; old runs go by config only."""
    rules: list[dict[str, Any]] = [
        {"id": "unfinished-uploads", "status": "Enabled", "filter": {"prefix": ""}, "abort_incomplete_multipart_upload": {"days_after_initiation": 2}},
        {"id": "replaced-versions", "status": "Enabled", "filter": {"prefix": ""}, "noncurrent_version_expiration": {"noncurrent_days": 7}},
    ]
    if checkpoint_days is not None:
        rules.append({"id": "old-checkpoints", "status": "Enabled", "filter": {"prefix": f"{prefix}/"}, "expiration": {"days": checkpoint_days}})
    return rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageArgs:
    settings: config.Storage
    partition: str
    vpc_id: pulumi.Input[str]
    subnet_id: pulumi.Input[str]
    subnet_cidr: pulumi.Input[str]
    gb_month_usd: float  # S3 Standard, for the sentence on what stays
    tags: Tags


class Storage(pulumi.ComponentResource):
    """``bucket``: its name; ``uri``: where runs go; ``after_destroy``: one sentence on what `pulumi destroy` does to it."""

    def __init__(self, name: str, args: StorageArgs, opts: ResourceOptions | None = None) -> None:
        super().__init__("ray-train-efa:infra:Storage", name, None, opts)
        settings = args.settings
        self.bucket: pulumi.Output[str]
        if settings.bucket:
            self.bucket = pulumi.Output.from_input(settings.bucket)
            self.bucket_arn = pulumi.Output.from_input(f"arn:{args.partition}:s3:::{settings.bucket}")
        else:
            made = self._make_bucket(name, args)
            self.bucket, self.bucket_arn = made.bucket, made.arn
        fate = AFTER_DESTROY["existing" if settings.bucket else settings.on_destroy]
        self.after_destroy = self.bucket.apply(lambda bucket: f"{bucket} " + fate.format(bucket=bucket, price=args.gb_month_usd))
        self.uri = self.bucket.apply(lambda bucket: f"s3://{bucket}/{settings.prefix}")
        self.fsx = self._make_fsx(name, args, settings.fsx) if settings.fsx else None
        self.register_outputs({"bucket": self.bucket})

    def _make_bucket(self, name: str, args: StorageArgs) -> aws.s3.Bucket:
        fate = args.settings.on_destroy
        # What guards a bucket that stays must stay too.
        child = ResourceOptions(parent=self, retain_on_delete=fate == "keep", protect=True if fate == "protect" else None)
        bucket = aws.s3.Bucket(f"{name}-runs", force_destroy=fate == "delete", tags=named(args.tags, f"{name}-runs"), opts=child)
        access = aws.s3.BucketPublicAccessBlock(
            f"{name}-runs",
            bucket=bucket.id,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=child,
        )
        aws.s3.BucketPolicy(
            f"{name}-runs",
            bucket=bucket.id,
            policy=bucket.arn.apply(lambda arn: json.dumps(tls_only_policy(arn))),
            # S3 refuses the two at the same moment (OperationAborted).
            opts=ResourceOptions.merge(child, ResourceOptions(depends_on=[access])),
        )
        encryption = aws.s3.BucketServerSideEncryptionConfigurationRuleApplyServerSideEncryptionByDefaultArgs(sse_algorithm="AES256")
        aws.s3.BucketServerSideEncryptionConfiguration(
            f"{name}-runs",
            bucket=bucket.id,
            rules=[aws.s3.BucketServerSideEncryptionConfigurationRuleArgs(apply_server_side_encryption_by_default=encryption)],
            opts=child,
        )
        versioning = aws.s3.BucketVersioning(
            f"{name}-runs", bucket=bucket.id, versioning_configuration=aws.s3.BucketVersioningVersioningConfigurationArgs(status="Enabled"), opts=child
        )
        rules = lifecycle_rules(args.settings.prefix, args.settings.checkpoint_days)
        aws.s3.BucketLifecycleConfiguration(
            f"{name}-runs",
            bucket=bucket.id,
            rules=[aws.s3.BucketLifecycleConfigurationRuleArgs(**rule) for rule in rules],
            # A rule for replaced versions needs versioning to be on.
            opts=ResourceOptions.merge(child, ResourceOptions(depends_on=[versioning])),
        )
        return bucket

    def _make_fsx(self, name: str, args: StorageArgs, fsx: config.Fsx) -> aws.fsx.LustreFileSystem:
        child = ResourceOptions(parent=self)
        group = aws.ec2.SecurityGroup(
            f"{name}-fsx",
            description="Lustre from the nodes' subnet",
            vpc_id=args.vpc_id,
            ingress=[
                aws.ec2.SecurityGroupIngressArgs(protocol="tcp", from_port=low, to_port=high, cidr_blocks=[args.subnet_cidr], description="Lustre")
                for low, high in LUSTRE_PORTS
            ],
            egress=[
                aws.ec2.SecurityGroupEgressArgs(protocol="tcp", from_port=low, to_port=high, cidr_blocks=[args.subnet_cidr], description="Lustre")
                for low, high in LUSTRE_PORTS
            ],
            tags=named(args.tags, f"{name}-fsx"),
            opts=child,
        )
        return aws.fsx.LustreFileSystem(
            f"{name}-fsx",
            subnet_ids=args.subnet_id,
            storage_capacity=fsx.capacity_gib,
            deployment_type="SCRATCH_2",  # a cache of S3: no replication to pay for
            security_group_ids=[group.id],
            tags=named(args.tags, f"{name}-fsx"),
            opts=child,
        )
