"""What EC2 says of instance types, zones and what runs, as the plain data of fit.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import fit
from ops.aws import Aws, AwsError

# DescribeInstanceTypes takes so many names at once.
TYPES_A_CALL = 100
ALIVE = ("pending", "running", "shutting-down", "stopping", "stopped")


def instance_of(answer: Mapping[str, Any]) -> fit.Instance:
    """An item of DescribeInstanceTypes."""
    nvidia = [gpu for gpu in answer.get("GpuInfo", {}).get("Gpus", []) if gpu.get("Manufacturer") == "NVIDIA"]
    network = answer.get("NetworkInfo", {})
    return fit.Instance(
        name=answer["InstanceType"],
        vcpus=int(answer["VCpuInfo"]["DefaultVCpus"]),
        memory_gib=answer["MemoryInfo"]["SizeInMiB"] / 1024,
        gpus=sum(int(gpu["Count"]) for gpu in nvidia),
        gpu_memory_gib=nvidia[0].get("MemoryInfo", {}).get("SizeInMiB", 0) / 1024 if nvidia else 0.0,
        efa_interfaces=int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 1)) if network.get("EfaSupported") else 0,
        network_cards=int(network.get("MaximumNetworkCards") or 1),
        architectures=tuple(answer.get("ProcessorInfo", {}).get("SupportedArchitectures", [])),
    )


def instance(aws: Aws, name: str) -> fit.Instance | None:
    """The type called ``name``; None where the region has none. Raises AwsError."""
    try:
        found = aws.ask("ec2", "describe_instance_types", InstanceTypes=[name])["InstanceTypes"]
    except AwsError as error:
        if error.code == "InvalidInstanceType":
            return None
        raise
    return instance_of(found[0]) if found else None


def efa_sizes(aws: Aws, name: str) -> tuple[str, ...]:
    """Types of the same family that have EFA."""
    filters = [{"Name": "instance-type", "Values": [f"{name.split('.')[0]}.*"]}, {"Name": "network-info.efa-supported", "Values": ["true"]}]
    return tuple(sorted(str(item["InstanceType"]) for item in aws.pages("ec2", "describe_instance_types", "InstanceTypes", Filters=filters)))


def zones(aws: Aws) -> tuple[fit.Zone, ...]:
    """Availability zones proper that are open to this account; local and wavelength zones have no EFA and no control plane."""
    filters = [{"Name": "opt-in-status", "Values": ["opt-in-not-required"]}, {"Name": "state", "Values": ["available"]}]
    found = aws.ask("ec2", "describe_availability_zones", Filters=filters)["AvailabilityZones"]
    return tuple(sorted((fit.Zone(zone["ZoneName"], zone["ZoneId"]) for zone in found), key=lambda zone: zone.name))


def offered(aws: Aws, name: str) -> tuple[str, ...]:
    """Zones that offer the type."""
    filters = [{"Name": "instance-type", "Values": [name]}]
    pages = aws.pages("ec2", "describe_instance_type_offerings", "InstanceTypeOfferings", LocationType="availability-zone", Filters=filters)
    return tuple(sorted(item["Location"] for item in pages))


def running(aws: Aws, tags: Mapping[str, str] | None = None, states: Iterable[str] = ALIVE) -> Iterable[dict[str, Any]]:
    """Instances, page by page; only those that carry ``tags``, where given."""
    filters = [{"Name": "instance-state-name", "Values": list(states)}, *tag_filters(tags or {})]
    for reservation in aws.pages("ec2", "describe_instances", "Reservations", Filters=filters, PaginationConfig={"PageSize": 1000}):
        yield from reservation["Instances"]


def tag_filters(tags: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"Name": f"tag:{key}", "Values": [value]} for key, value in tags.items()]


def vcpus_of(aws: Aws, names: Iterable[str]) -> dict[str, int]:
    """Default vCPUs of instance types: what quotas count."""
    wanted = sorted(set(names))
    found: dict[str, int] = {}
    for start in range(0, len(wanted), TYPES_A_CALL):
        answer = aws.ask("ec2", "describe_instance_types", InstanceTypes=wanted[start : start + TYPES_A_CALL])
        found |= {item["InstanceType"]: int(item["VCpuInfo"]["DefaultVCpus"]) for item in answer["InstanceTypes"]}
    return found
