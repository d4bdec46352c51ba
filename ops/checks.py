"""What can stop `up` half-way, or make it build the wrong thing: one function for each, none of which changes anything."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import ipaddress
import re
from collections.abc import Callable, Sequence

import config
import fit
import naming
import prices
import versions
from config import PROJECT
from ops import ec2, quotas
from ops.aws import Aws, AwsError, tags_of
from ops.findings import Finding
from ops.target import Target

# A stack is meant to outlive its creation by weeks; shorter support than this is worth a word.
SUPPORT_WARNING_DAYS = 90
# EC2 stops instances of a capacity block 30 minutes before its end.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-how.html
BLOCK_STOPS_BEFORE = datetime.timedelta(minutes=30)
# What `up` and `down` call that a person most often lacks; the whole list is in CloudTrail after a first `up`.
ACTIONS = tuple(
    f"{service}:{action}"
    for service, actions in {
        "ec2": "CreateVpc DeleteVpc CreateSubnet CreateInternetGateway CreateNatGateway DeleteNatGateway AllocateAddress ReleaseAddress CreateRouteTable"
        " CreateVpcEndpoint CreateLaunchTemplate DeleteLaunchTemplate CreatePlacementGroup RunInstances CreateTags DescribeInstanceTypes",
        "eks": "CreateCluster DeleteCluster CreateNodegroup DeleteNodegroup CreateAddon CreateAccessEntry CreatePodIdentityAssociation TagResource",
        "iam": "CreateRole DeleteRole AttachRolePolicy DetachRolePolicy PutRolePolicy PassRole TagRole CreateServiceLinkedRole",
        "s3": "CreateBucket DeleteBucket PutBucketPolicy PutLifecycleConfiguration",
        "logs": "CreateLogGroup DeleteLogGroup PutRetentionPolicy",
    }.items()
    for action in actions.split()
)
ACTIONS_A_CALL = 50


@dataclasses.dataclass(frozen=True)
class Context:
    """What the checks share: a stack, its account, and what EC2 said of its instance types."""

    target: Target
    aws: Aws
    account: str
    arn: str
    facts: fit.Facts
    now: datetime.datetime

    @property
    def stack(self) -> config.Stack:
        return self.target.settings

    @property
    def tags(self) -> dict[str, str]:
        """The two tags that only this stack's things carry."""
        every = self.target.tags(self.account, self.aws.region)
        return {"project": every["project"], "deployment": every["deployment"]}

    @property
    def gpus(self) -> str:
        return f"{self.stack.gpu.size[1]} x {self.facts.gpu.name}"


Check = Callable[[Context], list[Finding]]


def account(target: Target, aws: Aws, number: str, arn: str, environment_profile: str | None) -> list[Finding]:
    """Whose account it is, and whether it is the one that the stack means."""
    allowed = target.allowed_accounts
    found = [Finding("account", "ok", f"{number}, {aws.region}, as {arn}" + (f" (profile {target.profile})" if target.profile else ""))]
    if allowed and number not in allowed:
        what = f"these credentials are of account {number}; aws:allowedAccountIds names {', '.join(allowed)}"
        return [
            Finding("account", "fail", what, "the stack would be built in the wrong account", "use the right AWS_PROFILE, or correct aws:allowedAccountIds")
        ]
    if not allowed:
        name = f"pulumi config set --path 'aws:allowedAccountIds[0]' {number} --stack {target.name}"
        found.append(
            Finding("account", "note", "aws:allowedAccountIds is not set", "any account whose credentials are at hand would be taken", f"name yours: {name}")
        )
    if target.profile and environment_profile and environment_profile != target.profile:
        what = f"aws:profile = {target.profile}, but AWS_PROFILE is {environment_profile}"
        why = "`kubectl` and `aws` in this shell would use another identity than the stack"
        found.append(Finding("account", "warn", what, why, f"export AWS_PROFILE={target.profile}"))
    return found


def fits(context: Context) -> list[Finding]:
    """The program's own checks, by the same function. The quota is :mod:`ops.quotas`' matter, which knows what is in use."""
    problems = fit.problems(context.stack, dataclasses.replace(context.facts, quota_vcpus=None))
    found = []
    for problem in problems:
        what, _, do = problem.partition("; ")
        found.append(Finding("fit", "fail", what, "`up` refuses it before it makes anything", do or what))
    gpu = context.facts.gpu
    if gpu.efa_interfaces:
        what = f"{gpu.name}: {gpu.gpus} GPUs, {gpu.vcpus} vCPUs, {gpu.efa_interfaces} EFA interface{'s' * (gpu.efa_interfaces > 1)}"
        found.append(Finding("EFA", "ok", f"{what} on {gpu.network_cards} network card{'s' * (gpu.network_cards > 1)} (EC2)"))
    return found


def vcpus(context: Context) -> list[Finding]:
    stack, facts, aws = context.stack, context.facts, context.aws
    keys = "gpu.maxNodes" if stack.gpu.autoscaled else "gpu.nodes"
    gpu = quotas.vcpu_finding(quotas.gpu_quota(aws, stack, facts.gpu, context.tags), context.gpus, keys, aws.region)
    system = quotas.system_quota(aws, stack, facts.system, context.tags)
    return [gpu, quotas.vcpu_finding(system, f"{stack.system.nodes} x {facts.system.name}", "system.nodes", aws.region)]


def limits(context: Context) -> list[Finding]:
    able = set(context.facts.gpu_zones) & set(context.facts.system_zones)
    zone = context.stack.zone or min(able, default=None)  # the one that `up` would take
    return quotas.network_findings(context.aws, zone, {**context.tags, "cluster": context.target.prefix})


def permissions(context: Context) -> list[Finding]:
    """Asks IAM to simulate the actions. What a policy grants for certain resources or tags only can't be judged so, hence never more than a warning."""
    match = re.fullmatch(r"arn:(aws[a-z-]*):(iam|sts)::(\d+):(user|assumed-role|root|federated-user)(?:/(.+))?", context.arn)
    kind, name = (match[4], match[5] or "") if match else ("", "")
    if kind == "root":
        why = "root can't be limited, and its keys can't be taken back quietly"
        return [Finding("permissions", "warn", "these are the root user's keys", why, "make a role or a user for this work")]
    try:
        if kind == "assumed-role":  # the ARN of a session lacks the role's path
            source = context.aws.ask("iam", "get_role", RoleName=name.split("/")[0])["Role"]["Arn"]
        elif kind == "user":
            source = context.arn
        else:
            return [Finding("permissions", "unknown", f"{context.arn} is neither user nor role, so IAM can't simulate its rights")]
        refused: list[str] = []
        for start in range(0, len(ACTIONS), ACTIONS_A_CALL):
            names = list(ACTIONS[start : start + ACTIONS_A_CALL])
            results = context.aws.pages("iam", "simulate_principal_policy", "EvaluationResults", PolicySourceArn=source, ActionNames=names)
            refused += [item["EvalActionName"] for item in results if item["EvalDecision"] != "allowed"]
    except AwsError as error:
        if error.hopeless:
            raise
        return [Finding("permissions", "unknown", f"rights could not be simulated: {error}", "`up` may stop where one is missing")]
    if not refused:
        return [Finding("permissions", "ok", f"{len(ACTIONS)} actions of `up` and `down` are allowed (IAM simulation)")]
    what = f"IAM would refuse {len(refused)} of {len(ACTIONS)} actions: {', '.join(refused)}"
    return [Finding("permissions", "warn", what, "`up` would stop half-way, and `down` could not finish", f"have them added for {source}")]


def kubernetes(context: Context) -> list[Finding]:
    """Does EKS support the version, and until when without extra charge?"""
    wanted = context.stack.cluster.kubernetes_version
    try:
        found = {item["clusterVersion"]: item for item in context.aws.pages("eks", "describe_cluster_versions", "clusterVersions", includeAll=True)}
    except AwsError as error:
        if error.hopeless:
            raise
        return [_by_table(wanted, context.now, str(error))]
    standard = sorted((version for version, item in found.items() if _status(item) == "STANDARD_SUPPORT"), key=_numbers)
    do = f"set {PROJECT}:cluster.kubernetesVersion to {', '.join(repr(version) for version in reversed(standard))}"
    if wanted not in found or _status(found[wanted]) == "UNSUPPORTED":
        return [Finding("Kubernetes", "fail", f"EKS does not offer {wanted}", "no cluster of this version can be created", do)]
    if _status(found[wanted]) != "STANDARD_SUPPORT":
        why = "extended support costs $0.50 an hour more, and the stack refuses it (upgrade policy STANDARD)"
        return [Finding("Kubernetes", "fail", f"{wanted} is out of standard support", why, do)]
    end = found[wanted].get("endOfStandardSupportDate")
    if end is None:
        return [Finding("Kubernetes", "ok", f"{wanted} is in standard support")]
    return [_support(wanted, end.astimezone(datetime.UTC), context.now, "EKS", do if standard[-1] != wanted else "")]


def _support(version: str, end: datetime.datetime, now: datetime.datetime, source: str, do: str) -> Finding:
    days = (end - now).days
    what = f"{version} is in standard support until {end:%Y-%m-%d}, {days} days ({source})"
    if days >= SUPPORT_WARNING_DAYS:
        return Finding("Kubernetes", "ok", what)
    return Finding("Kubernetes", "warn", what, "after that day EKS upgrades the control plane by itself (upgrade policy STANDARD)", do or "plan the upgrade")


def _by_table(wanted: str, now: datetime.datetime, problem: str) -> Finding:
    end = versions.STANDARD_SUPPORT_ENDS.get(wanted)
    if end is None:
        return Finding("Kubernetes", "unknown", f"how long {wanted} is supported could not be asked: {problem}")
    day = datetime.datetime.fromisoformat(end).replace(tzinfo=datetime.UTC)
    if day <= now:
        do = f"set {PROJECT}:cluster.kubernetesVersion to {versions.KUBERNETES!r}"
        return Finding("Kubernetes", "fail", f"standard support of {wanted} ended on {end} (versions.py)", "extended support costs $0.50 an hour more", do)
    return _support(wanted, day, now, f"versions.py, for EKS was not asked: {problem}", "")


def _status(item: dict[str, object]) -> str:
    """Older answers have status alone, in another spelling."""
    return str(item.get("versionStatus") or item.get("status") or "").upper().replace("-", "_")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def clashes(context: Context) -> list[Finding]:
    """Names that another stack, or a half-done destroy, holds already."""
    name, own = context.target.prefix, context.tags["deployment"]
    found: list[Finding] = []
    if len(name) > naming.LONGEST_PREFIX:
        why = "role names add to it and end at 64 characters"
        found.append(Finding("names", "fail", f"{name!r} is longer than {naming.LONGEST_PREFIX} characters", why, "choose a shorter stack name"))
    try:
        cluster = context.aws.ask("eks", "describe_cluster", name=name)["cluster"]
        if tags_of(cluster, "tags").get("deployment") == own:
            found.append(Finding("names", "note", f"cluster {name} is this stack's own and is {cluster.get('status')}"))
        else:
            why = "`up` would stop at a cluster name that is taken"
            do = "choose another stack name, or find out whose it is"
            found.append(Finding("names", "fail", f"a cluster {name} that is not this stack's is here ({cluster.get('status')})", why, do))
    except AwsError as error:
        if error.code != "ResourceNotFoundException":
            raise
    groups = context.aws.ask("logs", "describe_log_groups", logGroupNamePrefix=f"/aws/eks/{name}/cluster")["logGroups"]
    if any(group["logGroupName"] == f"/aws/eks/{name}/cluster" for group in groups) and not found:
        arn = f"arn:{context.facts.partition}:logs:{context.aws.region}:{context.account}:log-group:/aws/eks/{name}/cluster"
        tags = context.aws.ask("logs", "list_tags_for_resource", resourceArn=arn).get("tags", {})
        whose = "this stack's own" if tags.get("deployment") == own else "nobody's by its tags: EKS makes it again when late log lines come after a destroy"
        why = "`up` makes this log group, and stops where it is there and not in the state (ResourceAlreadyExists)"
        do = f"aws logs delete-log-group --log-group-name /aws/eks/{name}/cluster --region {context.aws.region}"
        level = "warn" if tags.get("deployment") == own else "fail"
        found.append(Finding("names", level, f"log group /aws/eks/{name}/cluster is there without its cluster, {whose}", why, do))
    return found or [Finding("names", "ok", f"{name} is free")]


def addresses(context: Context) -> list[Finding]:
    """Room for pods, and other networks with the same addresses."""
    network = ipaddress.IPv4Network(context.stack.network.cidr)
    room = network.num_addresses // 2 - 5
    nodes = context.stack.gpu.size[1] + context.stack.system.nodes
    found = [Finding("addresses", "ok", f"{network}: {room:,} for {nodes} nodes and their pods, which take up to {nodes * config.IPS_PER_NODE}")]
    same = [
        vpc["VpcId"]
        for vpc in context.aws.pages("ec2", "describe_vpcs", "Vpcs")
        if ipaddress.IPv4Network(vpc["CidrBlock"]).overlaps(network) and tags_of(vpc).get("deployment") != context.tags["deployment"]
    ]
    if same:
        shown = ", ".join(same[:3]) + (f" and {len(same) - 3} more" if len(same) > 3 else "")
        why = "that is allowed, but the two can never be peered"
        found.append(Finding("addresses", "note", f"{network} overlaps {shown} in {context.aws.region}", why, "set network.cidr if they must be"))
    return found


def reservation(context: Context) -> list[Finding]:
    """Is the reservation or capacity block that the stack names the right one, and is there enough of it?"""
    capacity, aws = context.stack.gpu.capacity, context.aws
    if not capacity.reserved or capacity.id is None:
        return []
    key = f"{PROJECT}:gpu.capacity.id = {capacity.id}"
    try:
        (item,) = aws.ask("ec2", "describe_capacity_reservations", CapacityReservationIds=[capacity.id])["CapacityReservations"]
    except AwsError as error:
        if not error.code.startswith("InvalidCapacityReservation"):
            raise
        why = "the nodes could never start"
        return [Finding("reservation", "fail", f"{key}: not in {aws.region}, or not of this account", why, "correct the id or aws:region")]
    return [_judged(item, context, key)]


def _judged(item: dict[str, object], context: Context, key: str) -> Finding:
    kind, gpu, most = context.stack.gpu.capacity.kind, context.facts.gpu, context.stack.gpu.size[1]
    block = item.get("ReservationType") == "capacity-block"
    end, start = item.get("EndDate"), item.get("StartDate")
    free, zone = int(str(item.get("AvailableInstanceCount", 0))), item.get("AvailabilityZone")
    wrong: list[tuple[str, str]] = []
    if block != (kind == "capacity-block"):
        real = "capacity-block" if block else "reservation"
        wrong.append((f"is a {real}, not a {kind}", f"set gpu.capacity.kind to {real}"))
    if item.get("InstanceType") != gpu.name:
        wrong.append((f"is of {item.get('InstanceType')}", f"set gpu.instanceType to {item.get('InstanceType')}"))
    if item.get("State") not in ("active", "scheduled", "payment-pending"):
        wrong.append((f"is {item.get('State')}", "name another one"))
    if isinstance(start, datetime.datetime) and start > context.now:
        wrong.append((f"begins only at {start:%Y-%m-%d %H:%M} UTC", "run `up` then"))
    elif item.get("State") == "active" and free < most:
        wrong.append((f"has {free} free of {item.get('TotalInstanceCount')}, and {most} are needed", "lower gpu.nodes, or free some"))
    if context.stack.zone and zone and zone != context.stack.zone:
        wrong.append((f"lies in {zone}, the stack in {context.stack.zone}", f"set network.zone to {zone}"))
    if item.get("InstancePlatform", "Linux/UNIX") != "Linux/UNIX":
        wrong.append((f"is for {item.get('InstancePlatform')}", "reserve Linux/UNIX"))
    last = ""
    if isinstance(end, datetime.datetime):
        stops = end - BLOCK_STOPS_BEFORE if block else end
        left = stops - context.now
        last = f", until {stops:%Y-%m-%d %H:%M} UTC"
        if left <= datetime.timedelta():
            wrong.append((f"ended at {end:%Y-%m-%d %H:%M} UTC", "name another one"))
    if wrong:
        why = "the nodes would never start, or not where the stack is"
        return Finding("reservation", "fail", f"{key} {'; '.join(what for what, _ in wrong)}", why, "; ".join(do for _, do in wrong))
    return Finding("reservation", "ok", f"{item.get('CapacityReservationId')}: {free} of {item.get('TotalInstanceCount')} free in {zone}{last}")


def price(context: Context) -> list[Finding]:
    bill = prices.hourly(context.stack, context.aws.region, prices.table())
    over = prices.over_budget(context.stack, bill)
    what = f"${bill.usd_hour:.2f} an hour with all nodes up (prices of {bill.as_of})"
    if over:
        reason, _, do = over.partition("; ")
        return [Finding("price", "fail", reason, "`up` refuses it before it makes anything", do)]
    if bill.unknown:
        do = f"`python -m ops cost {context.target.name} --refresh` asks the price list API"
        return [Finding("price", "note", f"{what}, without {', '.join(bill.unknown)}, whose price is not known", "the real cost is higher", do)]
    return [Finding("price", "ok", what)]


def nodes(context: Context) -> list[Finding]:
    """Of a stack that is up: node groups with health issues, and what the consoles of its instances say. Empty where there is no cluster."""
    aws, cluster = context.aws, context.target.prefix
    try:
        aws.ask("eks", "describe_cluster", name=cluster)
    except AwsError as error:
        if error.code == "ResourceNotFoundException":
            return []
        raise
    found: list[Finding] = []
    for name in aws.pages("eks", "list_nodegroups", "nodegroups", clusterName=cluster):
        group = aws.ask("eks", "describe_nodegroup", clusterName=cluster, nodegroupName=name)["nodegroup"]
        for issue in group.get("health", {}).get("issues", []):
            what = f"{name}: {issue.get('code')}: {issue.get('message')}"
            ids = [str(id) for id in issue.get("resourceIds", []) if str(id).startswith("i-")][:2]
            said = [line for id in ids for line in console_lines(_console(aws, id))]
            why = "its console says: " + " | ".join(said) if said else "these nodes don't join the cluster"
            found.append(Finding("nodes", "fail", what, why, f"`python -m ops explain {context.target.name}` follows it into Kubernetes"))
        if group.get("status") in ("CREATE_FAILED", "DEGRADED") and not found:
            found.append(Finding("nodes", "fail", f"{name} is {group['status']}", "its nodes are not all there", "see the group in the EKS console"))
    return found


def _console(aws: Aws, instance: str) -> str:
    try:
        output = aws.ask("ec2", "get_console_output", InstanceId=instance, Latest=True).get("Output") or ""
    except AwsError as error:
        if error.hopeless:
            raise
        return ""
    try:
        return base64.b64decode(output, validate=True).decode(errors="replace")  # as EC2 sends it; boto3 decodes it in most versions
    except ValueError:
        return str(output)


def console_lines(text: str, most: int = 3) -> list[str]:
    """The last lines of a console that tell why a node does not join: of nodeadm, kubelet, containerd, cloud-init or the kernel in trouble."""
    telling = re.compile(
        r"(nodeadm|kubelet|containerd|cloud-init).*(fail|error|denied|timeout|unable)|unauthorized|kernel panic|out of memory|no space left", re.I
    )
    lines = [" ".join(line.split())[-300:] for line in text.splitlines() if telling.search(line)]
    return lines[-most:]


ALL: Sequence[tuple[str, Check]] = (
    ("fit", fits),
    ("vCPU quotas", vcpus),
    ("limits", limits),
    ("permissions", permissions),
    ("Kubernetes version", kubernetes),
    ("names", clashes),
    ("addresses", addresses),
    ("reservation", reservation),
    ("price", price),
    ("nodes", nodes),
)


def gather(target: Target, aws: Aws, account_number: str, arn: str) -> tuple[fit.Facts | None, list[Finding]]:
    """Asks EC2 what the checks build on; None, and why, where an instance type does not exist. Raises AwsError."""
    stack = target.settings
    gpu, system = ec2.instance(aws, stack.gpu.instance_type), ec2.instance(aws, stack.system.instance_type)
    why, missing = "nothing else can be checked without it", []
    for part, found, name in (("gpu", gpu, stack.gpu.instance_type), ("system", system, stack.system.instance_type)):
        if found is None:
            what = f"{PROJECT}:{part}.instanceType = {name!r}: EC2 has no such type in {aws.region}"
            missing.append(Finding("fit", "fail", what, why, "correct it or choose another aws:region"))
    if gpu is None or system is None:
        return None, missing
    zones = ec2.zones(aws)
    facts = fit.Facts(
        account=account_number,
        partition=arn.split(":")[1],
        region=aws.region,
        gpu=gpu,
        system=system,
        zones=zones,
        gpu_zones=ec2.offered(aws, gpu.name),
        system_zones=ec2.offered(aws, system.name),
        quota_vcpus=None,
        efa_sizes=() if gpu.efa_interfaces else ec2.efa_sizes(aws, gpu.name),
    )
    return facts, []
