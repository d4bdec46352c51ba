"""Puts the AWS half together: facts, checks, then the components in order of creation."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from typing import Any

import pulumi

import naming
import prices
from config import PROJECT, BadInput, Stack
from infra import efa, facts
from infra.autostop import AutoStop, AutoStopArgs
from infra.cluster import NODE_ADDONS, ControlPlane, ControlPlaneArgs
from infra.identity import Identity, IdentityArgs, NodeRole, NodeRoleArgs, autoscaler_policy
from infra.network import Network, NetworkArgs
from infra.node_groups import GpuNodes, GpuNodesArgs, SystemNodes, SystemNodesArgs, group_name
from infra.storage import Storage, StorageArgs


@dataclasses.dataclass(frozen=True)
class Infrastructure:
    """What the workloads need. ``ready``: everything Kubernetes objects must wait for, and must be gone before."""

    cluster_name: pulumi.Output[str]
    kubeconfig: pulumi.Output[str]
    storage_uri: pulumi.Output[str]
    gpu: facts.Instance
    efa_devices: int
    ready: Sequence[pulumi.Resource]
    outputs: dict[str, pulumi.Input[object]]


def build(stack: Stack, project: str, stack_name: str, now: datetime.datetime, allowed_accounts: Sequence[str] = ()) -> Infrastructure:
    """Registers everything that AWS bills. Raises BadInput, before the first resource, for what this account can't do or the budget forbids."""
    known = facts.lookup(stack)
    table = prices.table()
    bill = prices.hourly(stack, known.region, table)
    name = naming.prefix(project, stack_name)
    over = prices.over_budget(stack, bill)
    found = [*facts.problems(stack, known, allowed_accounts), *([over] if over else [])]
    if len(name) > naming.LONGEST_PREFIX:
        found.append(f"stack name {stack_name!r}: {name!r} is longer than {naming.LONGEST_PREFIX} characters, and role names add more; choose a shorter one")
    if found:
        raise BadInput("nothing was changed; this stack does not fit the account\n" + "\n".join(f"  - {line}" for line in found))
    zones = facts.choose_zones(stack, known)
    _say(stack, known, zones)
    tags = naming.base_tags(project, stack_name, stack.owner, naming.deployment_id(project, stack_name, known.account, known.region))

    network = Network(name, NetworkArgs(cidr=stack.network.cidr, region=known.region, zones=zones, zone_is_fixed=stack.zone is not None, tags=tags))
    storage = Storage(
        name,
        StorageArgs(
            settings=stack.storage,
            partition=known.partition,
            vpc_id=network.vpc.id,
            subnet_id=network.nodes.id,
            subnet_cidr=network.nodes.cidr_block.apply(str),
            gb_month_usd=table["monthly"]["s3StandardGb"],
            tags=tags,
        ),
    )
    role = NodeRole(name, NodeRoleArgs(partition=known.partition, tags=tags))
    cluster = ControlPlane(
        name,
        ControlPlaneArgs(
            vpc_id=network.vpc.id,
            subnet_ids=[subnet.id for subnet in network.control_plane],
            kubernetes_version=stack.cluster.kubernetes_version,
            public_access_cidrs=stack.cluster.public_access_cidrs,
            admins=stack.cluster.admins,
            secrets_key_arn=stack.cluster.secrets_key_arn,
            logs=stack.cluster.logs,
            log_retention_days=stack.cluster.log_retention_days,
            addon_pins=stack.pins.addons,
            partition=known.partition,
            tags=tags,
        ),
    )
    stop = _auto_stop(name, stack, known, now, tags)
    shared: dict[str, Any] = {
        "cluster_name": cluster.name,
        "security_group_id": cluster.security_group_id,
        "role_arn": role.role.arn,
        "subnet_id": network.nodes.id,
        "kubernetes_version": stack.cluster.kubernetes_version,
        "ami_release": stack.pins.ami_release,
        "tags": tags,
    }
    # Without these nodes neither join nor are cleaned up: policies, ways out, add-ons.
    before_nodes = [*role.attachments, *network.egress, *cluster.addons]
    late_addons = ["coredns", *(["aws-fsx-csi-driver"] if stack.storage.fsx else [])]
    system = SystemNodes(name, SystemNodesArgs(**shared, after=before_nodes, system=stack.system, late_addons=late_addons, addon_pins=stack.pins.addons))
    # The guard stands before what it guards.
    guarded = [*before_nodes, *([stop.schedule] if stop else [])]
    gpu = GpuNodes(name, GpuNodesArgs(**shared, after=guarded, gpu=stack.gpu, instance=known.gpu, zone=zones.nodes, cluster=name))
    identity = Identity(
        name,
        IdentityArgs(
            cluster_name=cluster.name,
            bucket_arn=storage.bucket_arn,
            prefix=stack.storage.prefix,
            autoscaler_policy=autoscaler_policy(known.partition, known.region, known.account, name) if stack.gpu.autoscaled else None,
            tags=tags,
        ),
    )
    outputs: dict[str, pulumi.Input[object]] = {
        "clusterName": cluster.name,
        "region": known.region,
        "zone": network.nodes.availability_zone,
        "kubeconfigCommand": cluster.name.apply(lambda made: f"aws eks update-kubeconfig --region {known.region} --name {made}"),
        # Its change is what a preview shows a person of a change of type.
        "gpuNodes": f"{_count(stack)} x {known.gpu.name}; another instance type replaces them all and stops a running job",
        "bucket": storage.bucket,
        "bucketAfterDestroy": storage.after_destroy,
        "costPerHour": {"usd": bill.usd_hour, "pricesAsOf": bill.as_of, "withoutPriceOf": list(bill.unknown)},
        "stopsAt": stop.stops_at if stop else "never (budget.stopAfter is not set)",
        "deployment": tags["deployment"],
    }
    if storage.fsx:
        outputs["fsx"] = {"id": storage.fsx.id, "dnsName": storage.fsx.dns_name, "mountName": storage.fsx.mount_name}
    return Infrastructure(
        cluster_name=cluster.name,
        kubeconfig=cluster.eks.kubeconfig_json,
        storage_uri=storage.uri,
        gpu=known.gpu,
        efa_devices=efa.efa_count(gpu.interfaces),
        ready=[cluster.eks, *cluster.addons, system.group, *system.addons, gpu.group, *gpu.tags, *network.egress, *identity.associations],
        outputs=outputs,
    )


def _count(stack: Stack) -> str:
    least, most = stack.gpu.size
    return str(most) if least == most else f"{least} to {most}"


def _auto_stop(name: str, stack: Stack, known: facts.Facts, now: datetime.datetime, tags: naming.Tags) -> AutoStop | None:
    after, delay = stack.budget.stop_after, stack.budget.stop_delay
    if after is None or delay is None:
        return None
    return AutoStop(
        name,
        AutoStopArgs(
            stop_after=after,
            delay=delay,
            now=now,
            cluster=name,
            node_group=group_name(stack.gpu.instance_type),
            autoscaled=stack.gpu.autoscaled,
            partition=known.partition,
            region=known.region,
            account=known.account,
            tags=tags,
        ),
    )


def _say(stack: Stack, known: facts.Facts, zones: facts.Zones) -> None:
    """What a person should read before the money starts: whose account, which zone, and what is left to AWS's defaults."""
    pulumi.log.info(f"account {known.account}, region {known.region}" + (f", nodes in {stack.zone}" if stack.zone else ""))
    if stack.zone is None:
        pulumi.log.info(
            f"{PROJECT}:network.zone is not set: a new stack takes {zones.nodes} and keeps it, an existing one stays where it is (output `zone`);"
            " `python -m ops doctor --pin` writes it down"
        )
    unpinned = [what for what, pin in (("AMI release", stack.pins.ami_release), ("image digest", stack.pins.image_digest or stack.ray.image)) if not pin]
    unpinned += [f"add-on {addon}" for addon in (*NODE_ADDONS, "coredns") if addon not in stack.pins.addons]
    if unpinned:
        pulumi.log.info(f"not pinned: {', '.join(unpinned)}. What AWS takes at creation stays; `python -m ops doctor --pin` writes it down")
    if "0.0.0.0/0" in stack.cluster.public_access_cidrs:
        pulumi.log.info(
            f"{PROJECT}:cluster.publicAccessCidrs: the API server answers the whole internet (IAM decides who gets in); name your network to narrow it"
        )
