"""How to ask AWS for each kind of thing that this project could have left: one generator a kind, page by page.

Three ways to know a thing: its own tags; a tag in which EKS, the CNI or a controller names the cluster; and where it lies (the stack's VPC) or what it is
called. The last two show what destroy could not know of, such as an endpoint that a security service put into the VPC.
"""

from __future__ import annotations

import dataclasses
import datetime
import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import prices
from config import PROJECT
from ops import ec2
from ops.aws import Aws, AwsError, tags_of

# Tags in which others name the cluster: EKS on launch templates, groups and instances; the CNI on interfaces; the load balancer controller.
CLUSTER_TAGS = ("eks:cluster-name", "aws:eks:cluster-name", "cluster.k8s.amazonaws.com/name", "elbv2.k8s.aws/cluster")
OWNED = "kubernetes.io/cluster/"
# Interfaces that go with their owner, which is listed itself.
OF_OTHERS = ("nat_gateway", "network_load_balancer", "load_balancer", "gateway_load_balancer", "vpc_endpoint", "gateway_load_balancer_endpoint")
HOURS = prices.HOURS_A_MONTH
TAGS_A_CALL = 20  # of load balancers and target groups
# Beyond so many pages of a bucket its size is said to be unknown rather than listed for minutes.
BUCKET_PAGES = 20
GB = 10**9


@dataclasses.dataclass(frozen=True)
class Leftover:
    """Something in the account. id: what AWS's calls take; by: tag, cluster, vpc or name, the way it was found; usd_month: None where not known."""

    kind: str
    id: str
    name: str
    region: str
    stack: str
    by: str
    created: datetime.datetime | None = None
    usd_month: float | None = 0.0
    note: str = ""
    kept: bool = False
    """Left on purpose: the stack file says so."""

    @property
    def marked(self) -> bool:
        """Whether it carries the stack's tags, or the cluster's name in a tag (or, for a schedule, which has no tags, in its target)."""
        return self.by in ("tag", "cluster")


@dataclasses.dataclass(frozen=True)
class Scope:
    """Whose things: of one deployment, or of every stack of this project. cluster may hold a * then. vpcs are filled in as they are found."""

    deployment: str | None
    stack: str | None
    cluster: str
    vpcs: tuple[str, ...] = ()

    @property
    def filter(self) -> dict[str, Any]:
        """What EC2 can select by itself."""
        return {"Name": "tag:deployment", "Values": [self.deployment]} if self.deployment else {"Name": "tag:project", "Values": [PROJECT]}

    def judge(self, tags: Mapping[str, str], vpc: str | None = None) -> str | None:
        """The way in which a thing with these tags in this VPC is the scope's; None if it is not."""
        if tags.get("project") == PROJECT and self.deployment in (None, tags.get("deployment")):
            return "tag"
        if tags.get("project") == PROJECT and tags.get("deployment"):
            return None  # another stack's, whatever else it says
        names = [tags[key] for key in CLUSTER_TAGS if key in tags] + [key.removeprefix(OWNED) for key in tags if key.startswith(OWNED)]
        if any(fnmatch.fnmatchcase(name, self.cluster) for name in names):
            return "cluster"
        return "vpc" if vpc is not None and vpc in self.vpcs else None

    def names(self, name: str) -> bool:
        """Whether something of this name may be the scope's; what it is only its tags say."""
        return fnmatch.fnmatchcase(name, self.cluster) or fnmatch.fnmatchcase(name, f"{self.cluster}-*")


@dataclasses.dataclass(frozen=True)
class Prices:
    """A region's part of prices.json; everything is None where the region is not in it."""

    table: Mapping[str, Any] | None

    def hour(self, part: str, count: float = 1) -> float | None:
        """A month of ``count`` of what is listed by the hour."""
        return self._of("hourly", part, count * HOURS)

    def month(self, part: str, count: float) -> float | None:
        return self._of("monthly", part, count)

    def instance(self, name: str, count: float = 1) -> float | None:
        return self._of("instances", name, count * HOURS)

    def _of(self, section: str, part: str, factor: float) -> float | None:
        price = (self.table or {}).get(section, {}).get(part)
        return None if price is None else round(price * factor, 2)


Finder = Callable[[Aws, Scope, Prices], Iterator[Leftover]]


def _ec2(
    aws: Aws, scope: Scope, operation: str, key: str, vpc_filter: str | None, cluster_tag: str | None = None, size: int = 500, **more: Any
) -> Iterator[dict[str, Any]]:
    """Items of an EC2 call by the stack's tag, by the tag in which others name the cluster on this kind of thing, and by VPC; each once."""
    selections = [scope.filter]
    if cluster_tag == OWNED:
        selections.append({"Name": "tag-key", "Values": [f"{OWNED}{scope.cluster}"]})
    elif cluster_tag:
        selections.append({"Name": f"tag:{cluster_tag}", "Values": [scope.cluster]})
    if vpc_filter and scope.vpcs:
        selections.append({"Name": vpc_filter, "Values": list(scope.vpcs)})
    ids = {"Addresses": "AllocationId", "SecurityGroups": "GroupId"}.get(key, key.removesuffix("s") + "Id")
    seen: set[str] = set()
    filters = list(more.pop("Filters", []))
    for selection in selections:
        for item in aws.pages("ec2", operation, key, Filters=[selection, *filters], PaginationConfig={"PageSize": size}, **more):
            if item[ids] not in seen:
                seen.add(item[ids])
                yield item


def _made(kind: str, aws: Aws, scope: Scope, id: str, tags: Mapping[str, str], by: str, **more: Any) -> Leftover:
    return Leftover(kind, id, more.pop("name", None) or tags.get("Name") or id, aws.region, tags.get("stack") or scope.stack or "?", by, **more)


def _from_ec2(
    kind: str, aws: Aws, scope: Scope, items: Iterable[Mapping[str, Any]], id: str, more: Callable[[Mapping[str, Any]], dict[str, Any] | None]
) -> Iterator[Leftover]:
    """Leftovers of EC2's items. ``more`` gives created, usd_month and note of an item, or None to leave it out."""
    for item in items:
        tags = tags_of(item)
        attached = [attachment.get("VpcId") for attachment in item.get("Attachments", []) if "VpcId" in attachment]
        by = scope.judge(tags, item.get("VpcId") or (attached[0] if attached else None))
        extra = more(item) if by else None
        if by and extra is not None:
            yield _made(kind, aws, scope, item[id], tags, by, **extra)


def vpcs(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    yield from _from_ec2("VPC", aws, scope, _ec2(aws, scope, "describe_vpcs", "Vpcs", None), "VpcId", lambda _: {})


def clusters(aws: Aws, scope: Scope, price: Prices) -> Iterator[Leftover]:
    """Clusters and their node groups."""
    for name in aws.pages("eks", "list_clusters", "clusters"):
        if not fnmatch.fnmatchcase(name, scope.cluster):
            continue
        cluster = aws.ask("eks", "describe_cluster", name=name)["cluster"]
        tags = tags_of(cluster, "tags")
        by = scope.judge(tags) or "name"
        if scope.deployment and tags.get("deployment", scope.deployment) != scope.deployment:
            continue
        usd = price.hour("controlPlane")
        note = str(cluster.get("status", ""))
        yield _made("EKS cluster", aws, scope, name, tags, by, name=name, created=cluster.get("createdAt"), usd_month=usd, note=note)
        for group in aws.pages("eks", "list_nodegroups", "nodegroups", clusterName=name):
            found = aws.ask("eks", "describe_nodegroup", clusterName=name, nodegroupName=group)["nodegroup"]
            mine = tags_of(found, "tags") or tags
            note = f"{found.get('scalingConfig', {}).get('desiredSize', '?')} nodes wanted, {found.get('status', '')}"
            yield _made("node group", aws, scope, f"{name}/{group}", mine, scope.judge(mine) or by, name=group, created=found.get("createdAt"), note=note)


def scaling_groups(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    for group in aws.pages("autoscaling", "describe_auto_scaling_groups", "AutoScalingGroups", PaginationConfig={"PageSize": 100}):
        tags = tags_of(group)
        by = scope.judge(tags)
        if by:
            name = group["AutoScalingGroupName"]
            note = f"{group.get('DesiredCapacity', '?')} wanted"
            yield _made("scaling group", aws, scope, name, tags, by, name=name, created=group.get("CreatedTime"), note=note)


def instances(aws: Aws, scope: Scope, price: Prices) -> Iterator[Leftover]:
    alive = [{"Name": "instance-state-name", "Values": list(ec2.ALIVE)}]
    for reservation in _ec2(aws, scope, "describe_instances", "Reservations", "vpc-id", OWNED, Filters=alive, size=1000):
        for item in reservation["Instances"]:
            tags, state = tags_of(item), item["State"]["Name"]
            by = scope.judge(tags, item.get("VpcId"))
            if by:
                usd = price.instance(item["InstanceType"]) if state in ("pending", "running") else 0.0
                note = f"{item['InstanceType']}, {state}"
                yield _made("instance", aws, scope, item["InstanceId"], tags, by, created=item.get("LaunchTime"), usd_month=usd, note=note)


def interfaces(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    def more(item: Mapping[str, Any]) -> dict[str, Any] | None:
        if item.get("InterfaceType") in OF_OTHERS:
            return None
        attachment = item.get("Attachment") or {}
        owner = attachment.get("InstanceId") or item.get("Description") or ""
        note = f"{item.get('Status', '')}{', ' + owner if owner else ''}"
        return {"created": attachment.get("AttachTime"), "note": note}

    found = _ec2(aws, scope, "describe_network_interfaces", "NetworkInterfaces", "vpc-id", "cluster.k8s.amazonaws.com/name", size=1000)
    yield from _from_ec2("interface", aws, scope, found, "NetworkInterfaceId", more)


def addresses(aws: Aws, scope: Scope, price: Prices) -> Iterator[Leftover]:
    def more(item: Mapping[str, Any]) -> dict[str, Any]:
        used = item.get("AssociationId") or item.get("NetworkInterfaceId")
        return {"usd_month": price.hour("publicIpv4"), "note": f"{item.get('PublicIp')}, {'in use' if used else 'free'}"}

    found = _ec2(aws, scope, "describe_addresses", "Addresses", None)
    yield from _from_ec2("Elastic IP", aws, scope, found, "AllocationId", more)


def nat_gateways(aws: Aws, scope: Scope, price: Prices) -> Iterator[Leftover]:
    def more(item: Mapping[str, Any]) -> dict[str, Any] | None:
        if item.get("State") in ("deleted", "failed"):
            return None
        return {"created": item.get("CreateTime"), "usd_month": price.hour("natGateway"), "note": str(item.get("State", ""))}

    found = _ec2(aws, scope, "describe_nat_gateways", "NatGateways", "vpc-id")
    yield from _from_ec2("NAT gateway", aws, scope, found, "NatGatewayId", more)


def endpoints(aws: Aws, scope: Scope, price: Prices) -> Iterator[Leftover]:
    def more(item: Mapping[str, Any]) -> dict[str, Any] | None:
        if str(item.get("State", "")).lower() in ("deleted", "deleting"):
            return None
        gateway = item.get("VpcEndpointType") == "Gateway"
        usd = 0.0 if gateway else price.hour("interfaceEndpoint", max(1, len(item.get("SubnetIds", []))))
        managed = ", managed by another AWS service (GuardDuty?)" if item.get("RequesterManaged") else ""
        return {"created": item.get("CreationTimestamp"), "usd_month": usd, "note": f"{item.get('ServiceName', '')}{managed}"}

    found = _ec2(aws, scope, "describe_vpc_endpoints", "VpcEndpoints", "vpc-id")
    yield from _from_ec2("VPC endpoint", aws, scope, found, "VpcEndpointId", more)


def subnets(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    found = _ec2(aws, scope, "describe_subnets", "Subnets", "vpc-id")
    yield from _from_ec2("subnet", aws, scope, found, "SubnetId", lambda item: {"note": f"{item.get('CidrBlock')}, {item.get('AvailabilityZone')}"})


def route_tables(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    found = _ec2(aws, scope, "describe_route_tables", "RouteTables", "vpc-id", size=100)

    def more(item: Mapping[str, Any]) -> dict[str, Any] | None:
        return None if any(link.get("Main") for link in item.get("Associations", [])) else {}  # the main one goes with its VPC

    yield from _from_ec2("route table", aws, scope, found, "RouteTableId", more)


def internet_gateways(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    found = _ec2(aws, scope, "describe_internet_gateways", "InternetGateways", "attachment.vpc-id")
    yield from _from_ec2("internet gateway", aws, scope, found, "InternetGatewayId", lambda _: {})


def security_groups(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    def more(item: Mapping[str, Any]) -> dict[str, Any] | None:
        return None if item["GroupName"] == "default" else {"name": item["GroupName"]}  # the default one goes with its VPC

    found = _ec2(aws, scope, "describe_security_groups", "SecurityGroups", "vpc-id", OWNED)
    yield from _from_ec2("security group", aws, scope, found, "GroupId", more)


def volumes(aws: Aws, scope: Scope, price: Prices) -> Iterator[Leftover]:
    def more(item: Mapping[str, Any]) -> dict[str, Any]:
        usd: float | None = None
        if item.get("VolumeType") == "gp3" and item.get("Iops", 3000) <= 3000:
            size, fast = price.month("gp3Gib", item["Size"]), price.month("gp3Mibps", max(0, item.get("Throughput", 125) - prices.GP3_FREE_MIBPS))
            usd = None if size is None or fast is None else round(size + fast, 2)
        attached = [link["InstanceId"] for link in item.get("Attachments", []) if link.get("InstanceId")]
        note = f"{item['Size']} GiB {item.get('VolumeType', '')}, {'of ' + attached[0] if attached else item.get('State', '')}"
        return {"created": item.get("CreateTime"), "usd_month": usd, "note": note}

    yield from _from_ec2("volume", aws, scope, _ec2(aws, scope, "describe_volumes", "Volumes", None, OWNED), "VolumeId", more)


def snapshots(aws: Aws, scope: Scope, price: Prices) -> Iterator[Leftover]:
    def more(item: Mapping[str, Any]) -> dict[str, Any]:
        usd = price.month("snapshotGib", item["VolumeSize"])
        return {"created": item.get("StartTime"), "usd_month": usd, "note": f"of a volume of {item['VolumeSize']} GiB, which is the most it can bill"}

    found = _ec2(aws, scope, "describe_snapshots", "Snapshots", None, size=1000, OwnerIds=["self"])
    yield from _from_ec2("snapshot", aws, scope, found, "SnapshotId", more)


def launch_templates(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    def more(item: Mapping[str, Any]) -> dict[str, Any]:
        return {"created": item.get("CreateTime"), "name": item["LaunchTemplateName"]}

    found = _ec2(aws, scope, "describe_launch_templates", "LaunchTemplates", None, "eks:cluster-name", size=200)
    yield from _from_ec2("launch template", aws, scope, found, "LaunchTemplateId", more)


def placement_groups(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    # This call has no pages.
    for item in aws.ask("ec2", "describe_placement_groups", Filters=[scope.filter])["PlacementGroups"]:
        tags = tags_of(item)
        by = scope.judge(tags)
        if by and item.get("State") not in ("deleting", "deleted"):
            yield _made("placement group", aws, scope, item["GroupName"], tags, by, name=item["GroupName"])


def reservations(aws: Aws, scope: Scope, price: Prices) -> Iterator[Leftover]:
    """What of a reservation is unused is billed as if it ran; what is used is billed as the instance."""

    def more(item: Mapping[str, Any]) -> dict[str, Any]:
        unused = int(item.get("AvailableInstanceCount", 0))
        ends = f", ends {item['EndDate']:%Y-%m-%d %H:%M} UTC" if item.get("EndDate") else ", without an end"
        note = f"{item.get('TotalInstanceCount')} x {item.get('InstanceType')}, {unused} unused{ends}"
        return {"created": item.get("CreateDate"), "usd_month": price.instance(str(item.get("InstanceType")), unused), "note": note}

    filters = [{"Name": "state", "Values": ["active", "pending", "scheduled"]}]
    found = _ec2(aws, scope, "describe_capacity_reservations", "CapacityReservations", None, Filters=filters)
    yield from _from_ec2("reservation", aws, scope, found, "CapacityReservationId", more)


def load_balancers(aws: Aws, scope: Scope, price: Prices) -> Iterator[Leftover]:
    """Application, network and gateway ones, and classic ones; their tags are asked for twenty at a time."""
    pages = aws.pages("elbv2", "describe_load_balancers", "LoadBalancers")
    for item, tags in _tagged(aws, "elbv2", pages, "LoadBalancerArn", "ResourceArns", "ResourceArn"):
        by = scope.judge(tags, item.get("VpcId"))
        if by:
            usd = price.hour("loadBalancer") if item.get("Type") in ("application", "network") else None
            more = {"created": item.get("CreatedTime"), "usd_month": usd, "note": str(item.get("Type", ""))}
            yield _made("load balancer", aws, scope, item["LoadBalancerArn"], tags, by, name=item["LoadBalancerName"], **more)
    for item, tags in _tagged(
        aws, "elb", aws.pages("elb", "describe_load_balancers", "LoadBalancerDescriptions"), "LoadBalancerName", "LoadBalancerNames", "LoadBalancerName"
    ):
        by = scope.judge(tags, item.get("VPCId"))
        if by:
            name = item["LoadBalancerName"]
            yield _made("classic load balancer", aws, scope, name, tags, by, name=name, created=item.get("CreatedTime"), usd_month=None)


def target_groups(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    pages = aws.pages("elbv2", "describe_target_groups", "TargetGroups")
    for item, tags in _tagged(aws, "elbv2", pages, "TargetGroupArn", "ResourceArns", "ResourceArn"):
        by = scope.judge(tags, item.get("VpcId"))
        if by:
            yield _made("target group", aws, scope, item["TargetGroupArn"], tags, by, name=item["TargetGroupName"])


def _tagged(
    aws: Aws, service: str, items: Iterable[Mapping[str, Any]], id: str, parameter: str, key: str
) -> Iterator[tuple[Mapping[str, Any], dict[str, str]]]:
    batch: list[Mapping[str, Any]] = []

    def flush() -> Iterator[tuple[Mapping[str, Any], dict[str, str]]]:
        if batch:
            answer = aws.ask(service, "describe_tags", **{parameter: [item[id] for item in batch]})["TagDescriptions"]
            tags = {description[key]: tags_of(description) for description in answer}
            yield from ((item, tags.get(item[id], {})) for item in batch)
            batch.clear()

    for item in items:
        batch.append(item)
        if len(batch) == TAGS_A_CALL:
            yield from flush()
    yield from flush()


def file_systems(aws: Aws, scope: Scope, price: Prices) -> Iterator[Leftover]:
    for item in aws.pages("fsx", "describe_file_systems", "FileSystems"):
        tags = tags_of(item)
        by = scope.judge(tags, item.get("VpcId"))
        if by:
            scratch = item.get("LustreConfiguration", {}).get("DeploymentType") == "SCRATCH_2"
            usd = price.month("fsxScratchGib", item["StorageCapacity"]) if scratch else None
            note = f"{item['StorageCapacity']} GiB {item.get('FileSystemType', '')}"
            yield _made("FSx", aws, scope, item["FileSystemId"], tags, by, created=item.get("CreationTime"), usd_month=usd, note=note)


def log_groups(aws: Aws, scope: Scope, price: Prices) -> Iterator[Leftover]:
    for start in ("/aws/eks/", "/aws/containerinsights/"):
        prefix = start + scope.cluster.split("*")[0]
        for item in aws.pages("logs", "describe_log_groups", "logGroups", logGroupNamePrefix=prefix):
            name = item["logGroupName"]
            cluster = name.removeprefix(start).split("/")[0]
            if not fnmatch.fnmatchcase(cluster, scope.cluster):
                continue
            arn = str(item.get("logGroupArn") or item["arn"]).removesuffix(":*")
            tags = {str(key): str(value) for key, value in aws.ask("logs", "list_tags_for_resource", resourceArn=arn).get("tags", {}).items()}
            made = datetime.datetime.fromtimestamp(item["creationTime"] / 1000, datetime.UTC) if item.get("creationTime") else None
            usd = price.month("logsGb", item.get("storedBytes", 0) / GB)
            note = "" if tags else "made by EKS, for late log lines"
            yield _made("log group", aws, scope, name, tags, scope.judge(tags) or "name", name=name, created=made, usd_month=usd, note=note)


def schedules(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    """A schedule carries no tags; it is the stack's if its target names the stack's cluster."""
    for item in aws.pages("scheduler", "list_schedules", "Schedules", NamePrefix=scope.cluster.split("*")[0]):
        found = aws.ask("scheduler", "get_schedule", Name=item["Name"], GroupName=item.get("GroupName", "default"))
        try:
            cluster = str(json.loads(found["Target"].get("Input") or "{}").get("ClusterName", ""))
        except (ValueError, AttributeError):
            cluster = ""
        if fnmatch.fnmatchcase(cluster, scope.cluster):
            id = f"{item.get('GroupName', 'default')}/{item['Name']}"
            note = str(found.get("ScheduleExpression", ""))
            yield _made("schedule", aws, scope, id, {}, "cluster", name=item["Name"], created=item.get("CreationDate"), note=note)


def roles(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    for item in aws.pages("iam", "list_roles", "Roles", PaginationConfig={"PageSize": 1000}):
        if scope.names(item["RoleName"]):
            tags = tags_of(aws.ask("iam", "list_role_tags", RoleName=item["RoleName"]))
            yield from _by_name("IAM role", aws, scope, item["RoleName"], item["RoleName"], tags, item.get("CreateDate"))


def policies(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    for item in aws.pages("iam", "list_policies", "Policies", Scope="Local", PaginationConfig={"PageSize": 1000}):
        if scope.names(item["PolicyName"]):
            tags = tags_of(aws.ask("iam", "list_policy_tags", PolicyArn=item["Arn"]))
            yield from _by_name("IAM policy", aws, scope, item["Arn"], item["PolicyName"], tags, item.get("CreateDate"))


def oidc_providers(aws: Aws, scope: Scope, _: Prices) -> Iterator[Leftover]:
    """Of EKS clusters only; their address does not say of which, so the tags alone decide."""
    for item in aws.ask("iam", "list_open_id_connect_providers")["OpenIDConnectProviderList"]:
        if ".eks." in item["Arn"]:
            tags = tags_of(aws.ask("iam", "list_open_id_connect_provider_tags", OpenIDConnectProviderArn=item["Arn"]))
            by = scope.judge(tags)
            if by:
                yield _made("OIDC provider", aws, scope, item["Arn"], tags, by, name=item["Arn"].rsplit("/", 1)[-1])


def repositories(aws: Aws, scope: Scope, price: Prices) -> Iterator[Leftover]:
    for item in aws.pages("ecr", "describe_repositories", "repositories"):
        if not scope.names(item["repositoryName"].replace("/", "-")):
            continue
        tags = tags_of(aws.ask("ecr", "list_tags_for_resource", resourceArn=item["repositoryArn"]), "tags")
        images = aws.pages("ecr", "describe_images", "imageDetails", repositoryName=item["repositoryName"])
        usd = price.month("ecrGb", sum(image.get("imageSizeInBytes", 0) for image in images) / GB)
        yield from _by_name("ECR repository", aws, scope, item["repositoryName"], item["repositoryName"], tags, item.get("createdAt"), usd)


def buckets(aws: Aws, scope: Scope, price: Prices) -> Iterator[Leftover]:
    """Of this region. Their names begin with the stack's; their tags decide."""
    for item in aws.pages("s3", "list_buckets", "Buckets"):
        name = item["Name"]
        if not scope.names(name):
            continue
        try:
            place = item.get("BucketRegion") or aws.ask("s3", "get_bucket_location", Bucket=name).get("LocationConstraint") or "us-east-1"
            if place != aws.region:
                continue
            tags = tags_of(aws.ask("s3", "get_bucket_tagging", Bucket=name), "TagSet")
        except AwsError as error:
            if error.code != "NoSuchTagSet":
                raise
            tags = {}
        size, objects = _size(aws, name)
        usd = None if size is None else price.month("s3StandardGb", size / GB)
        note = "more objects than are counted here" if size is None else f"{objects:,} objects, {size / GB:.2f} GB"
        yield from _by_name("bucket", aws, scope, name, name, tags, item.get("CreationDate"), usd, note)


def _size(aws: Aws, bucket: str) -> tuple[int | None, int]:
    """Bytes and number of all versions; None where there are too many to list."""
    total, count = 0, 0
    for version in aws.pages("s3", "list_object_versions", "Versions", Bucket=bucket):
        total, count = total + int(version.get("Size", 0)), count + 1
        if count >= BUCKET_PAGES * 1000:
            return None, count
    return total, count


def _by_name(
    kind: str, aws: Aws, scope: Scope, id: str, name: str, tags: Mapping[str, str], created: Any, usd: float | None = 0.0, note: str = ""
) -> Iterator[Leftover]:
    """Something found by its name: the stack's by its tags, another's by its tags, or nobody's."""
    by = scope.judge(tags)
    if by is None and (tags.get("deployment") or not _exactly(name, scope)):
        return
    yield _made(kind, aws, scope, id, tags, by or "name", name=name, created=created, usd_month=usd, note=note)


def _exactly(name: str, scope: Scope) -> bool:
    """A name as Pulumi makes them (``ray-train-efa-dev-node-1a2b3c4``): `dev` must not claim what is `dev-2`'s."""
    stem = re.escape(scope.cluster).replace(r"\*", ".*")
    return re.fullmatch(rf"{stem}-[a-z]+(-[a-z]+)?-[0-9a-f]{{7}}", name) is not None


# In the order in which a person looks for what bills; VPCs are asked for first, for the others are found by them too.
REGIONAL: Mapping[str, Finder] = {
    "clusters": clusters,
    "instances": instances,
    "reservations": reservations,
    "NAT gateways": nat_gateways,
    "load balancers": load_balancers,
    "file systems": file_systems,
    "volumes": volumes,
    "snapshots": snapshots,
    "Elastic IPs": addresses,
    "VPC endpoints": endpoints,
    "buckets": buckets,
    "repositories": repositories,
    "log groups": log_groups,
    "scaling groups": scaling_groups,
    "interfaces": interfaces,
    "security groups": security_groups,
    "launch templates": launch_templates,
    "placement groups": placement_groups,
    "target groups": target_groups,
    "schedules": schedules,
    "subnets": subnets,
    "route tables": route_tables,
    "internet gateways": internet_gateways,
}
# The same from every region.
GLOBAL: Mapping[str, Finder] = {"roles": roles, "policies": policies, "OIDC providers": oidc_providers}
