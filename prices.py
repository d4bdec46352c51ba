"""What a stack costs an hour, by the dated table prices.json. Says so where a price is not known rather than guessing one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config import Stack

TABLE = Path(__file__).with_name("prices.json")
HOURS_A_MONTH = 730
GP3_FREE_MIBPS = 125
# The GPU nodes' root disk: gp3 gives 0.25 MiB/s per IOPS, so the free 3000 IOPS carry up to 750.
GPU_DISK_MIBPS = 500
GPU_DISK_IOPS = 3000


@dataclasses.dataclass(frozen=True)
class Line:
    what: str
    count: int
    usd_hour: float  # each


@dataclasses.dataclass(frozen=True)
class Bill:
    """``unknown`` names what has no price in the table; the total is then too low."""

    lines: tuple[Line, ...]
    unknown: tuple[str, ...]
    as_of: str

    @property
    def usd_hour(self) -> float:
        return round(sum(line.count * line.usd_hour for line in self.lines), 4)


def table() -> dict[str, Any]:
    """The price table as data."""
    return dict(json.loads(TABLE.read_text(encoding="utf-8")))


def of_region(prices: Mapping[str, Any], region: str) -> Mapping[str, Any] | None:
    """The part of the table that holds in the region: its own, where the price list API was asked about it, else the common one; None for neither."""
    own = prices.get("byRegion", {}).get(region)
    return own or (prices if region in prices["regions"] else None)


def hourly(stack: Stack, region: str, prices: Mapping[str, Any]) -> Bill:
    """The bill of an hour with all nodes up (an autoscaled group at maxNodes), without data transfer, storage of the bucket, logs and tax.

    Spot is counted at the on-demand price, which it does not exceed; a capacity block has been paid for in advance and counts nothing.
    """
    found = of_region(prices, region)
    known = found is not None
    prices = found or prices
    instances: Mapping[str, float] = prices["instances"] if known else {}
    parts = ("controlPlane", "natGateway", "publicIpv4") if known else ()
    lines = [Line(what, 1, prices["hourly"][what]) for what in parts if what in prices["hourly"]]
    unknown = [what for what in parts if what not in prices["hourly"]] if known else [f"region {region}"]
    nodes = stack.gpu.size[1]
    prepaid = stack.gpu.capacity.kind == "capacity-block"
    for kind, count, free in ((stack.system.instance_type, stack.system.nodes, False), (stack.gpu.instance_type, nodes, prepaid)):
        if free:
            lines.append(Line(f"{kind} (capacity block, paid in advance)", count, 0.0))
        elif kind in instances:
            lines.append(Line(kind, count, instances[kind]))
        elif known:
            unknown.append(kind)
    month = prices["monthly"]
    if known and not {"gp3Gib", "gp3Mibps"} <= set(month):
        unknown.append("gp3")
    elif known:
        lines.append(Line(f"gp3 {stack.system.disk_gib} GiB", stack.system.nodes, stack.system.disk_gib * month["gp3Gib"] / HOURS_A_MONTH))
        throughput = (GPU_DISK_MIBPS - GP3_FREE_MIBPS) * month["gp3Mibps"]
        lines.append(Line(f"gp3 {stack.gpu.disk_gib} GiB, {GPU_DISK_MIBPS} MiB/s", nodes, (stack.gpu.disk_gib * month["gp3Gib"] + throughput) / HOURS_A_MONTH))
    if stack.storage.fsx:
        unknown.append("FSx for Lustre")
    if stack.cluster.secrets_key_arn:
        unknown.append("requests to your KMS key")
    return Bill(tuple(lines), tuple(unknown), prices["asOf"])


def over_budget(stack: Stack, bill: Bill) -> str | None:
    """Why the stack is refused by budget.maxHourlyUsd, or None."""
    limit = stack.budget.max_hourly_usd
    if limit is None:
        return None
    if bill.usd_hour > limit:
        return (
            f"ray-train-efa:budget.maxHourlyUsd = {limit:g}: this stack would cost ${bill.usd_hour:.2f} an hour (prices of {bill.as_of});"
            " use fewer nodes (gpu.nodes), a smaller gpu.instanceType, or raise the limit"
        )
    if bill.unknown:
        return (
            f"ray-train-efa:budget.maxHourlyUsd = {limit:g} can't be held: no price of {', '.join(bill.unknown)} in prices.json;"
            " run `python -m ops cost STACK --refresh`, or take the limit out"
        )
    return None
