"""What the account may still have: vCPU quotas less what is in use, and the limits of the network."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import fit
from config import Stack
from ops import ec2
from ops.aws import Aws, AwsError, tags_of
from ops.findings import Finding

# Service, quota code, what AWS gives a new account (https://docs.aws.amazon.com/general/latest/gr/vpc-service.html and .../eks.html).
NETWORK = {
    "VPCs": ("vpc", "L-F678F1CE", 5),
    "internet gateways": ("vpc", "L-A4707A72", 5),
    "NAT gateways in the zone": ("vpc", "L-FE5A380F", 5),
    "Elastic IP addresses": ("ec2", "L-0263D0A3", 5),
    "EKS clusters": ("eks", "L-1194D53C", 100),
}
STANDARD = "L-1216C47A"  # Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances
NAMES = {
    "L-DB2E81BA": "Running On-Demand G and VT instances",
    "L-3819A6DF": "All G and VT Spot Instance Requests",
    "L-417A185B": "Running On-Demand P instances",
    "L-7212CCBC": "All P4, P3 and P2 Spot Instance Requests",
    "L-C4BD4855": "All P5 Spot Instance Requests",
    STANDARD: "Running On-Demand Standard instances",
}


@dataclasses.dataclass(frozen=True)
class VcpuQuota:
    """limit is None where it could not be read; used: by everything in the account and region but this stack; needed: by this stack."""

    code: str
    limit: float | None
    used: int
    needed: int
    problem: str = ""

    @property
    def free(self) -> float | None:
        return None if self.limit is None else max(0.0, self.limit - self.used)

    @property
    def enough(self) -> bool | None:
        return None if self.free is None else self.needed <= self.free


def counted(code: str, instance_type: str, spot: bool) -> bool:
    """Does a running instance count against the quota?"""
    family = instance_type.split(".")[0]
    if code == STANDARD:
        return not spot and family[0] in "acdhimrtz" and not family.startswith(("inf", "trn", "dl"))
    if code in ("L-DB2E81BA", "L-3819A6DF"):
        return family.startswith(("g", "vt")) and spot == (code == "L-3819A6DF")
    if not family.startswith("p"):
        return False
    if code == "L-417A185B":
        return not spot
    return spot and family.startswith("p5") == (code == "L-C4BD4855")


def limit(aws: Aws, service: str, code: str) -> float:
    """The quota's value in this account, or AWS's default for accounts that never asked for another. Raises AwsError."""
    try:
        return float(aws.ask("service-quotas", "get_service_quota", ServiceCode=service, QuotaCode=code)["Quota"]["Value"])
    except AwsError as error:
        if error.code != "NoSuchResourceException":
            raise
    return float(aws.ask("service-quotas", "get_aws_default_service_quota", ServiceCode=service, QuotaCode=code)["Quota"]["Value"])


def in_use(aws: Aws, code: str, own_tags: Mapping[str, str]) -> int:
    """vCPUs that count against the quota: what runs, and what is reserved and empty; not what this stack itself runs. Raises AwsError."""
    types: Counter[str] = Counter()
    for item in ec2.running(aws, states=("pending", "running")):
        own = own_tags.items() <= tags_of(item).items()
        if not own and counted(code, item["InstanceType"], item.get("InstanceLifecycle") == "spot"):
            types[item["InstanceType"]] += 1
    try:
        for reservation in aws.pages("ec2", "describe_capacity_reservations", "CapacityReservations", Filters=[{"Name": "state", "Values": ["active"]}]):
            if reservation.get("ReservationType", "default") == "default" and counted(code, reservation["InstanceType"], False):
                types[reservation["InstanceType"]] += int(reservation.get("AvailableInstanceCount", 0))
    except AwsError as error:
        if error.hopeless:
            raise  # else: empty reservations stay uncounted, which makes the quota look larger than it is
    sizes = ec2.vcpus_of(aws, types)
    return sum(count * sizes.get(name, 0) for name, count in types.items())


def gpu_quota(aws: Aws, stack: Stack, gpu: fit.Instance, own_tags: Mapping[str, str]) -> VcpuQuota | None:
    """The quota that the GPU nodes count against; None for reserved capacity."""
    code = fit.quota_code(stack)
    return None if code is None else _quota(aws, code, gpu.vcpus * stack.gpu.size[1], own_tags)


def system_quota(aws: Aws, stack: Stack, system: fit.Instance, own_tags: Mapping[str, str]) -> VcpuQuota:
    return _quota(aws, STANDARD, system.vcpus * stack.system.nodes, own_tags)


def _quota(aws: Aws, code: str, needed: int, own_tags: Mapping[str, str]) -> VcpuQuota:
    try:
        return VcpuQuota(code, limit(aws, "ec2", code), in_use(aws, code, own_tags), needed)
    except AwsError as error:
        if error.hopeless:
            raise
        return VcpuQuota(code, None, 0, needed, str(error))


def increase(service: str, code: str, value: float, region: str) -> str:
    """The command that asks AWS for more."""
    return f"aws service-quotas request-service-quota-increase --service-code {service} --quota-code {code} --desired-value {value:.0f} --region {region}"


def vcpu_finding(quota: VcpuQuota | None, what: str, keys: str, region: str) -> Finding:
    """``what``: ``2 x g6.12xlarge``; ``keys``: the settings that make the number."""
    if quota is None:
        return Finding("vCPU quota", "ok", f"{what}: reserved capacity, whose quota was spent when it was reserved")
    name = f"{NAMES.get(quota.code, 'vCPU quota')} ({quota.code})"
    if quota.limit is None:
        return Finding(
            "vCPU quota",
            "unknown",
            f"{name} could not be read: {quota.problem}",
            f"{what} need {quota.needed} vCPUs of it",
            "look in the Service Quotas console",
        )
    numbers = f"{what} need {quota.needed} vCPUs; {name} in {region}: {quota.limit:g} allowed, {quota.used} in use by others, {quota.free:g} free"
    if quota.enough:
        return Finding("vCPU quota", "ok", numbers)
    ask = increase("ec2", quota.code, quota.used + quota.needed, region)
    return Finding(
        "vCPU quota", "fail", numbers, "the nodes would never start; EKS waits half an hour before it says so", f"lower {keys}, or ask (hours to days): {ask}"
    )


def network_findings(aws: Aws, zone: str | None, own: Mapping[str, str]) -> list[Finding]:
    """One finding for each limit that the stack's VPC, NAT gateway, address or cluster would break, and one for all that they don't."""
    every = [_network_finding(aws, what, zone, own) for what in NETWORK]
    good = [finding.what for finding in every if finding.level == "ok"]
    return [finding for finding in every if finding.level != "ok"] + ([Finding("limits", "ok", "; ".join(good))] if good else [])


def _network_finding(aws: Aws, what: str, zone: str | None, own: Mapping[str, str]) -> Finding:
    service, code, default = NETWORK[what]
    try:
        there = _count(aws, what, zone, own)
    except AwsError as error:
        if error.hopeless:
            raise
        return Finding("limits", "unknown", f"{what} could not be counted: {error}", "the stack needs one more")
    try:
        allowed, known = limit(aws, service, code), ""
    except AwsError as error:
        if error.hopeless:
            raise
        allowed, known = float(default), f" (AWS's default; the quota {code} could not be read)"
    others, mine = there
    numbers = f"{what}: others use {others} of {allowed:g}{known}"
    if mine or others + 1 <= allowed:
        return Finding("limits", "ok", numbers + (", this stack has its own" if mine else ""))
    return Finding(
        "limits",
        "fail" if not known else "warn",
        numbers,
        "`up` would stop in the middle for want of one more",
        f"delete one that nobody needs (`python -m ops leftovers --all` lists this project's), or ask: {increase(service, code, others + 1, aws.region)}",
    )


def _count(aws: Aws, what: str, zone: str | None, own: Mapping[str, str]) -> tuple[int, int]:
    """(others', this stack's)."""
    if what == "EKS clusters":
        names = list(aws.pages("eks", "list_clusters", "clusters"))
        return sum(name != own["cluster"] for name in names), int(own["cluster"] in names)
    operation, key = {
        "VPCs": ("describe_vpcs", "Vpcs"),
        "internet gateways": ("describe_internet_gateways", "InternetGateways"),
        "NAT gateways in the zone": ("describe_nat_gateways", "NatGateways"),
        "Elastic IP addresses": ("describe_addresses", "Addresses"),
    }[what]
    items: list[Any] = list(aws.pages("ec2", operation, key))
    if what.startswith("NAT"):
        here = {subnet["SubnetId"] for subnet in aws.pages("ec2", "describe_subnets", "Subnets") if zone is None or subnet["AvailabilityZone"] == zone}
        items = [item for item in items if item["SubnetId"] in here and item.get("State") not in ("deleted", "failed")]
    mine = sum(tags_of(item).get("deployment") == own["deployment"] for item in items)
    return len(items) - mine, mine
