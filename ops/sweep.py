"""Deletes leftovers: only what carries the stack's tags, in the order in which AWS lets go of things."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ops.aws import Aws, AwsError
from ops.left_kinds import Leftover

# What must be gone before what: an interface goes after its instance, a group after the interfaces in it, the VPC last.
ORDER = (
    "schedule",
    "node group",
    "EKS cluster",
    "scaling group",
    "instance",
    "reservation",
    "load balancer",
    "classic load balancer",
    "target group",
    "FSx",
    "VPC endpoint",
    "NAT gateway",
    "interface",
    "Elastic IP",
    "volume",
    "snapshot",
    "launch template",
    "placement group",
    "security group",
    "subnet",
    "route table",
    "internet gateway",
    "VPC",
    "log group",
    "IAM role",
    "IAM policy",
    "OIDC provider",
    "ECR repository",
    "bucket",
)
PASSES = 4
# Between two passes, for AWS lets go of interfaces minutes after their instances.
PAUSE_SECONDS = 20.0
# The longest that something is waited for: a control plane takes ten minutes to go, a node group as long.
WAIT_SECONDS = 1500.0
POLL_SECONDS = 10.0
GONE = ("NotFound", "NoSuch", "ResourceNotFound", "LoadBalancerNotFound", "RepositoryNotFoundException", "FileSystemNotFound", "NoSuchEntity")
OBJECTS_A_CALL = 1000

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Swept:
    """deleted: now gone; refused: left, each with the reason."""

    deleted: tuple[Leftover, ...]
    refused: tuple[tuple[Leftover, str], ...]


def deletable(items: Sequence[Leftover], delete_buckets: frozenset[str] = frozenset()) -> tuple[list[Leftover], list[tuple[Leftover, str]]]:
    """(what may be deleted, in order; what may not, and why). delete_buckets: stacks whose file says storage.onDestroy: delete."""
    good: list[Leftover] = []
    not_: list[tuple[Leftover, str]] = []
    for item in items:
        if item.kept:
            not_.append((item, "kept on purpose (storage.onDestroy)"))
        elif not item.marked:
            not_.append((item, f"carries no tag of this stack (found by {item.by}); if it is yours: {command(item)}"))
        elif item.kind == "bucket" and item.stack not in delete_buckets:
            not_.append((item, f"holds checkpoints, and no stack file says that they may go (storage.onDestroy: delete); if they may: {command(item)}"))
        else:
            good.append(item)
    return sorted(good, key=lambda item: (item.region, ORDER.index(item.kind), item.name)), not_


def delete(
    aws: Aws,
    items: Sequence[Leftover],
    *,
    progress: Progress = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Swept:
    """Deletes these, as :func:`deletable` ordered them, in several passes. Raises AwsError where the account can't be asked at all."""
    left, done, reasons = list(items), [], dict[tuple[str, str, str], AwsError]()
    for attempt in range(PASSES):
        again: list[Leftover] = []
        for item in left:
            progress(f"{item.kind} {item.name}")
            try:
                _delete(aws.elsewhere(item.region), item, sleep, clock)
                done.append(item)
            except AwsError as error:
                if error.hopeless:
                    raise
                # A deletion of several steps may miss something of another step's: only when it does so again is the thing itself gone.
                if any(word in error.code for word in GONE) and (item.kind in SIMPLE or attempt):
                    done.append(item)
                    continue
                reasons[_key(item)] = error
                again.append(item)
        left = again
        if not left or all(reasons[_key(item)].kind == "denied" for item in left):
            break
        if attempt + 1 < PASSES:
            progress(f"{len(left)} wait for others to go")
            sleep(PAUSE_SECONDS)
    return Swept(tuple(done), tuple((item, str(reasons[_key(item)])) for item in left))


def _key(item: Leftover) -> tuple[str, str, str]:
    return item.region, item.kind, item.id


def _delete(aws: Aws, item: Leftover, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
    special = SPECIAL.get(item.kind)
    if special is not None:
        special(aws, item)
    else:
        service, operation, parameter, more = SIMPLE[item.kind]
        value: Any = [item.id] if parameter.endswith(("Ids", "Arns")) else item.id
        aws.ask(service, operation, **{parameter: value, **more})
    wait = WAITS.get(item.kind)
    end = clock() + WAIT_SECONDS
    while wait is not None and wait(aws, item):
        if clock() > end:
            raise AwsError(f"{item.kind} {item.name} was told to go {WAIT_SECONDS / 60:.0f} minutes ago and is still there; look at it in the console", "other")
        sleep(POLL_SECONDS)


# kind: service, call, parameter, further ones.
SIMPLE: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "EKS cluster": ("eks", "delete_cluster", "name", {}),
    "scaling group": ("autoscaling", "delete_auto_scaling_group", "AutoScalingGroupName", {"ForceDelete": True}),
    "instance": ("ec2", "terminate_instances", "InstanceIds", {}),
    "reservation": ("ec2", "cancel_capacity_reservation", "CapacityReservationId", {}),
    "load balancer": ("elbv2", "delete_load_balancer", "LoadBalancerArn", {}),
    "classic load balancer": ("elb", "delete_load_balancer", "LoadBalancerName", {}),
    "target group": ("elbv2", "delete_target_group", "TargetGroupArn", {}),
    "FSx": ("fsx", "delete_file_system", "FileSystemId", {}),
    "VPC endpoint": ("ec2", "delete_vpc_endpoints", "VpcEndpointIds", {}),
    "NAT gateway": ("ec2", "delete_nat_gateway", "NatGatewayId", {}),
    "interface": ("ec2", "delete_network_interface", "NetworkInterfaceId", {}),
    "Elastic IP": ("ec2", "release_address", "AllocationId", {}),
    "volume": ("ec2", "delete_volume", "VolumeId", {}),
    "snapshot": ("ec2", "delete_snapshot", "SnapshotId", {}),
    "launch template": ("ec2", "delete_launch_template", "LaunchTemplateId", {}),
    "placement group": ("ec2", "delete_placement_group", "GroupName", {}),
    "subnet": ("ec2", "delete_subnet", "SubnetId", {}),
    "VPC": ("ec2", "delete_vpc", "VpcId", {}),
    "log group": ("logs", "delete_log_group", "logGroupName", {}),
    "OIDC provider": ("iam", "delete_open_id_connect_provider", "OpenIDConnectProviderArn", {}),
    "ECR repository": ("ecr", "delete_repository", "repositoryName", {"force": True}),
}


def _schedule(aws: Aws, item: Leftover) -> None:
    group, _, name = item.id.partition("/")
    aws.ask("scheduler", "delete_schedule", GroupName=group, Name=name)


def _node_group(aws: Aws, item: Leftover) -> None:
    cluster, _, name = item.id.partition("/")
    aws.ask("eks", "delete_nodegroup", clusterName=cluster, nodegroupName=name)


def _security_group(aws: Aws, item: Leftover) -> None:
    """Its own rules first: two groups that name each other hold each other."""
    (group,) = aws.ask("ec2", "describe_security_groups", GroupIds=[item.id])["SecurityGroups"]
    for call, rules in (("revoke_security_group_ingress", group.get("IpPermissions")), ("revoke_security_group_egress", group.get("IpPermissionsEgress"))):
        naming_groups = [rule for rule in rules or [] if rule.get("UserIdGroupPairs")]
        if naming_groups:
            try:
                aws.ask("ec2", call, GroupId=item.id, IpPermissions=naming_groups)
            except AwsError as error:
                if "NotFound" not in error.code:  # the other group went first, its rules with it
                    raise
    aws.ask("ec2", "delete_security_group", GroupId=item.id)


def _route_table(aws: Aws, item: Leftover) -> None:
    (table,) = aws.ask("ec2", "describe_route_tables", RouteTableIds=[item.id])["RouteTables"]
    for link in table.get("Associations", []):
        if not link.get("Main"):
            aws.ask("ec2", "disassociate_route_table", AssociationId=link["RouteTableAssociationId"])
    aws.ask("ec2", "delete_route_table", RouteTableId=item.id)


def _internet_gateway(aws: Aws, item: Leftover) -> None:
    (gateway,) = aws.ask("ec2", "describe_internet_gateways", InternetGatewayIds=[item.id])["InternetGateways"]
    for link in gateway.get("Attachments", []):
        aws.ask("ec2", "detach_internet_gateway", InternetGatewayId=item.id, VpcId=link["VpcId"])
    aws.ask("ec2", "delete_internet_gateway", InternetGatewayId=item.id)


def _role(aws: Aws, item: Leftover) -> None:
    for policy in aws.pages("iam", "list_attached_role_policies", "AttachedPolicies", RoleName=item.id):
        aws.ask("iam", "detach_role_policy", RoleName=item.id, PolicyArn=policy["PolicyArn"])
    for name in aws.pages("iam", "list_role_policies", "PolicyNames", RoleName=item.id):
        aws.ask("iam", "delete_role_policy", RoleName=item.id, PolicyName=name)
    for profile in aws.pages("iam", "list_instance_profiles_for_role", "InstanceProfiles", RoleName=item.id):
        aws.ask("iam", "remove_role_from_instance_profile", InstanceProfileName=profile["InstanceProfileName"], RoleName=item.id)
    aws.ask("iam", "delete_role", RoleName=item.id)


def _policy(aws: Aws, item: Leftover) -> None:
    for version in aws.pages("iam", "list_policy_versions", "Versions", PolicyArn=item.id):
        if not version["IsDefaultVersion"]:
            aws.ask("iam", "delete_policy_version", PolicyArn=item.id, VersionId=version["VersionId"])
    aws.ask("iam", "delete_policy", PolicyArn=item.id)


def _bucket(aws: Aws, item: Leftover) -> None:
    for batch in _batches(_versions(aws, item.id)):
        answer = aws.ask("s3", "delete_objects", Bucket=item.id, Delete={"Objects": batch, "Quiet": True})
        for error in answer.get("Errors", [])[:1]:
            raise AwsError(f"s3:DeleteObject in {item.region}: {item.id}/{error.get('Key')}: {error.get('Message')}", "other", str(error.get("Code")))
    for upload in aws.pages("s3", "list_multipart_uploads", "Uploads", Bucket=item.id):
        aws.ask("s3", "abort_multipart_upload", Bucket=item.id, Key=upload["Key"], UploadId=upload["UploadId"])
    aws.ask("s3", "delete_bucket", Bucket=item.id)


def _versions(aws: Aws, bucket: str) -> Iterator[dict[str, str]]:
    for key in ("Versions", "DeleteMarkers"):
        for version in aws.pages("s3", "list_object_versions", key, Bucket=bucket):
            yield {"Key": version["Key"], "VersionId": version["VersionId"]}


def _batches(items: Iterator[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    batch: list[dict[str, str]] = []
    for item in items:
        batch.append(item)
        if len(batch) == OBJECTS_A_CALL:
            yield batch
            batch = []
    if batch:
        yield batch


SPECIAL: dict[str, Callable[[Aws, Leftover], None]] = {
    "schedule": _schedule,
    "node group": _node_group,
    "security group": _security_group,
    "route table": _route_table,
    "internet gateway": _internet_gateway,
    "IAM role": _role,
    "IAM policy": _policy,
    "bucket": _bucket,
}


def _group_there(aws: Aws, item: Leftover) -> bool:
    cluster, _, name = item.id.partition("/")
    return name in list(aws.pages("eks", "list_nodegroups", "nodegroups", clusterName=cluster))


def _cluster_there(aws: Aws, item: Leftover) -> bool:
    return item.id in list(aws.pages("eks", "list_clusters", "clusters"))


def _instance_there(aws: Aws, item: Leftover) -> bool:
    found = [one for one in aws.pages("ec2", "describe_instances", "Reservations", InstanceIds=[item.id]) for one in one["Instances"]]
    return any(one["State"]["Name"] != "terminated" for one in found)


def _nat_there(aws: Aws, item: Leftover) -> bool:
    return any(one.get("State") not in ("deleted", "failed") for one in aws.pages("ec2", "describe_nat_gateways", "NatGateways", NatGatewayIds=[item.id]))


# What keeps others until it is really gone.
WAITS: dict[str, Callable[[Aws, Leftover], bool]] = {
    "node group": _group_there,
    "EKS cluster": _cluster_there,
    "instance": _instance_there,
    "NAT gateway": _nat_there,
}


def command(item: Leftover) -> str:
    """What a person types to delete it."""
    region = f" --region {item.region}"
    if item.kind == "bucket":
        return f"aws s3 rb --force s3://{item.id}"
    if item.kind in ("node group", "schedule"):
        first, _, second = item.id.partition("/")
        words = (
            "eks delete-nodegroup --cluster-name {} --nodegroup-name {}" if item.kind == "node group" else "scheduler delete-schedule --group-name {} --name {}"
        )
        return f"aws {words.format(first, second)}{region}"
    if item.kind in SIMPLE:
        service, operation, parameter, _ = SIMPLE[item.kind]
        option = "".join(f"-{char.lower()}" if char.isupper() else char for char in parameter).lstrip("-")
        return f"aws {service} {operation.replace('_', '-')} --{option} {item.id}{region}"
    nouns = {"security group": ("ec2", "--group-id"), "route table": ("ec2", "--route-table-id"), "internet gateway": ("ec2", "--internet-gateway-id")}
    service, option = nouns.get(item.kind, ("iam", "--role-name" if item.kind == "IAM role" else "--policy-arn"))
    return f"aws {service} delete-{item.kind.removeprefix('IAM ').replace(' ', '-')} {option} {item.id}" + (region if service != "iam" else "")
