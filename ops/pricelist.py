"""Prices from AWS's price list API, in the form of prices.json."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ops.aws import Aws

# The API itself lives in few regions, whichever region it is asked about.
HOME = "us-east-1"
SOURCE = "AWS price list API (pricing:GetProducts), on-demand, USD, asked {day}"
# What prices.json calls it: service, and the attributes that leave one product. usagetype has a region's prefix everywhere but in us-east-1.
HOURLY = {
    "controlPlane": ("AmazonEKS", {"usagetype": "AmazonEKS-Hours:perCluster"}),
    "natGateway": ("AmazonEC2", {"productFamily": "NAT Gateway", "usagetype": "NatGateway-Hours"}),
    "publicIpv4": ("AmazonVPC", {"usagetype": "PublicIPv4:InUseAddress"}),
    "loadBalancer": ("AWSELB", {"productFamily": "Load Balancer-Application", "usagetype": "LoadBalancerUsage"}),
    "interfaceEndpoint": ("AmazonVPC", {"usagetype": "VpcEndpoint-Hours"}),
}
MONTHLY = {
    "gp3Gib": ("AmazonEC2", {"volumeApiName": "gp3", "usagetype": "EBS:VolumeUsage.gp3"}),
    "gp3Mibps": ("AmazonEC2", {"volumeApiName": "gp3", "usagetype": "EBS:VolumeP-Throughput.gp3"}),
    "s3StandardGb": ("AmazonS3", {"usagetype": "TimedStorage-ByteHrs"}),
    "snapshotGib": ("AmazonEC2", {"usagetype": "EBS:SnapshotUsage"}),
    "ecrGb": ("AmazonECR", {"usagetype": "TimedStorage-ByteHrs"}),
    "logsGb": ("AmazonCloudWatch", {"usagetype": "TimedStorage-ByteHrs"}),
    "fsxScratchGib": ("AmazonFSx", {"deploymentOption": "SCRATCH_2", "storageType": "SSD", "fileSystemType": "Lustre"}),
}
# gp3 throughput is listed per GiB/s.
WORKERS = 8
SCALE = {"gp3Mibps": 1 / 1024}


def usd(product: str) -> float | None:
    """On-demand USD of the first tier that costs something, from one item of a PriceList (a JSON text); None where there is none."""
    terms = json.loads(product).get("terms", {}).get("OnDemand", {})
    found = [
        (float(dimension.get("beginRange", 0)), float(dimension["pricePerUnit"]["USD"]))
        for term in terms.values()
        for dimension in term["priceDimensions"].values()
        if "USD" in dimension["pricePerUnit"]
    ]
    paid = sorted((start, price) for start, price in found if price > 0)
    return paid[0][1] if paid else None


def _products(aws: Aws, service: str, attributes: Mapping[str, str]) -> Iterator[str]:
    # All but a region's prefix is known of a usage type.
    filters = [{"Type": "CONTAINS" if field == "usagetype" else "EQUALS", "Field": field, "Value": value} for field, value in attributes.items()]
    yield from aws.elsewhere(HOME).pages("pricing", "get_products", "PriceList", ServiceCode=service, Filters=filters)


def instance_usd(aws: Aws, instance_type: str, region: str) -> float | None:
    """Linux, shared tenancy, on demand, an hour. Raises AwsError."""
    wanted = {
        "instanceType": instance_type,
        "regionCode": region,
        "operatingSystem": "Linux",
        "preInstalledSw": "NA",
        "tenancy": "Shared",
        "capacitystatus": "Used",
        "licenseModel": "No License required",
    }
    return next((price for product in _products(aws, "AmazonEC2", wanted) if (price := usd(product))), None)


def part_usd(aws: Aws, part: str, region: str) -> float | None:
    """The price of what prices.json lists under ``hourly`` or ``monthly``. Raises AwsError."""
    service, attributes = {**HOURLY, **MONTHLY}[part]
    suffix = attributes.get("usagetype")
    for product in _products(aws, service, {**attributes, "regionCode": region}):
        usage = str(json.loads(product)["product"]["attributes"].get("usagetype", ""))
        if suffix is not None and usage != suffix and not usage.endswith(f"-{suffix}"):
            continue
        price = usd(product)
        if price is not None:
            return price * SCALE.get(part, 1)
    return None


def region_table(aws: Aws, region: str, instance_types: Sequence[str], day: datetime.date | None = None) -> dict[str, Any]:
    """A table as prices.json has it, for one region; what the API has no price of is left out of it, and so counts as unknown. Raises AwsError."""
    today = day or datetime.datetime.now(datetime.UTC).date()
    aws.elsewhere(HOME).client("pricing")  # made once, before many threads want it
    with ThreadPoolExecutor(max_workers=WORKERS) as pool:
        parts = dict(zip((*HOURLY, *MONTHLY), pool.map(lambda part: part_usd(aws, part, region), (*HOURLY, *MONTHLY)), strict=True))
        names = list(dict.fromkeys(instance_types))
        found = dict(zip(names, pool.map(lambda name: instance_usd(aws, name, region), names), strict=True))
    hourly = {part: price for part in HOURLY if (price := parts[part]) is not None}
    monthly = {part: price for part in MONTHLY if (price := parts[part]) is not None}
    instances = {name: price for name, price in found.items() if price is not None}
    source = SOURCE.format(day=today.isoformat())
    return {
        "asOf": today.isoformat(),
        "currency": "USD",
        "regions": [region],
        "sources": dict.fromkeys(("instances", *hourly, *monthly), source),
        "hourly": hourly,
        "monthly": monthly,
        "instances": instances,
    }
