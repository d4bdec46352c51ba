"""Where a stack could go: its region's zones, and other regions, the best first."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fit
import prices
from config import Stack
from ops import ec2, pricelist, quotas
from ops.aws import Aws, AwsError


@dataclasses.dataclass(frozen=True)
class ZoneRank:
    """score: AWS's spot placement score, 1 to 10, a hint only; None where it was not asked or not given."""

    name: str
    id: str
    gpu: bool
    system: bool
    control_plane: bool
    score: int | None
    chosen: bool = False

    @property
    def fits(self) -> bool:
        return self.gpu and self.system


@dataclasses.dataclass(frozen=True)
class RegionRank:
    """zones: those that offer both instance types; free_vcpus of the quota for the GPU nodes; usd_hour of the whole stack. None: not known."""

    name: str
    zones: tuple[str, ...]
    needed_vcpus: int
    free_vcpus: float | None
    usd_hour: float | None
    prices_as_of: str | None
    score: int | None
    problem: str = ""

    @property
    def fits(self) -> bool:
        return bool(self.zones) and not self.problem and (self.free_vcpus is None or self.needed_vcpus <= self.free_vcpus)


def rank(zones: Sequence[fit.Zone], gpu: Sequence[str], system: Sequence[str], scores: Mapping[str, int], chosen: str | None) -> list[ZoneRank]:
    """Zones that offer both types first; of those the higher score, then those that host a control plane too, then by name.

    A zone that the stack names is marked, not moved: its place shows what else there is.
    """
    made = [
        ZoneRank(
            zone.name, zone.id, zone.name in gpu, zone.name in system, zone.id not in fit.ZONES_WITHOUT_CONTROL_PLANE, scores.get(zone.id), zone.name == chosen
        )
        for zone in zones
    ]
    return sorted(made, key=lambda zone: (not zone.fits, -(zone.score or 0), not zone.control_plane, zone.name))


def rank_regions(regions: Sequence[RegionRank]) -> list[RegionRank]:
    """Those that fit first; of those the cheapest (an unknown price last), the higher score, the name."""
    return sorted(regions, key=lambda region: (not region.fits, region.usd_hour is None, region.usd_hour or 0.0, -(region.score or 0), region.name))


def spot_scores(aws: Aws, instance_type: str, count: int, regions: Sequence[str], by_zone: bool) -> dict[str, int]:
    """Zone id (or region) to score; empty where AWS gives none, for it is only a hint.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-placement-score.html
    """
    try:
        found = aws.ask(
            "ec2",
            "get_spot_placement_scores",
            InstanceTypes=[instance_type],
            TargetCapacity=count,
            TargetCapacityUnitType="units",
            SingleAvailabilityZone=by_zone,
            RegionNames=list(regions),
        )["SpotPlacementScores"]
    except AwsError as error:
        if error.hopeless:
            raise
        return {}
    return {item["AvailabilityZoneId" if by_zone else "Region"]: int(item["Score"]) for item in found}


def look(aws: Aws, stack: Stack, own_tags: Mapping[str, str], table: Mapping[str, Any]) -> RegionRank:
    """What a region offers this stack. A region that can't be asked says so in ``problem``; raises AwsError only where no region could be."""
    gpu_type, system_type, most = stack.gpu.instance_type, stack.system.instance_type, stack.gpu.size[1]
    try:
        gpu = ec2.instance(aws, gpu_type)
        if gpu is None:
            return RegionRank(aws.region, (), 0, None, None, None, None, f"no {gpu_type} here")
        both = tuple(sorted(set(ec2.offered(aws, gpu_type)) & set(ec2.offered(aws, system_type))))
        quota = quotas.gpu_quota(aws, stack, gpu, own_tags)
        score = spot_scores(aws, gpu_type, most, [aws.region], by_zone=False).get(aws.region)
        bill = _bill(aws, stack, table)
    except AwsError as error:
        if error.kind == "credentials":
            raise
        return RegionRank(aws.region, (), 0, None, None, None, None, str(error))
    needed = gpu.vcpus * most if quota else 0
    problem = "" if both else f"no zone offers {gpu_type} and {system_type}"
    usd, as_of = (bill.usd_hour, bill.as_of) if bill and not bill.unknown else (None, None)
    return RegionRank(aws.region, both, needed, quota.free if quota else None, usd, as_of, score, problem)


def compare(aws: Aws, stack: Stack, regions: Sequence[str], own_tags: Mapping[str, str]) -> list[RegionRank]:
    """``look`` at each region at the same time, ranked. Raises AwsError where the credentials don't work."""
    table = prices.table()
    with ThreadPoolExecutor(max_workers=min(8, len(regions))) as pool:
        found = list(pool.map(lambda region: look(aws.elsewhere(region), stack, own_tags, table), regions))
    return rank_regions(found)


def _bill(aws: Aws, stack: Stack, table: Mapping[str, Any]) -> prices.Bill | None:
    """By the table; for a region that it lacks by the price list API, where that may be asked."""
    if prices.of_region(table, aws.region):
        return prices.hourly(stack, aws.region, table)
    try:
        fresh = pricelist.region_table(aws, aws.region, [stack.gpu.instance_type, stack.system.instance_type])
    except AwsError as error:
        if error.kind == "credentials":
            raise
        return None
    return prices.hourly(stack, aws.region, fresh)
