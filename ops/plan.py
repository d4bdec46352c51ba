"""What `up` would build and what it would cost, before any of it exists."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import config
import fit
import prices
from ops import checks, phases, recording, target
from ops.engine import Engine
from ops.errors import BadInput, Refused

# Facts for who has no account yet.
INSTANCES = Path(__file__).with_name("instances.json")
ANY_ACCOUNT = "000000000000"
# Friday 18:00 to Monday 09:00.
WEEKEND = datetime.timedelta(hours=63)
SAME = ("same", "read", "refresh")
# They group resources, and are none.
COMPONENTS = ("pulumi:", phases.TOKEN, "eks:index:")

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Planned:
    """So many things of a kind in a part of the program. op: create, update, delete, replace; same is left out."""

    part: str
    kind: str
    op: str
    count: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """USD. until_stop is None without budget.stopAfter; weekend: forgotten from Friday 18:00 to Monday 09:00, auto-stop counted.

    unknown: what has no price, so that all sums are too low.
    """

    lines: tuple[prices.Line, ...]
    an_hour: float
    stop_after: str | None
    until_stop: float | None
    after_stop_an_hour: float
    weekend: float
    a_month: float
    unknown: tuple[str, ...]
    as_of: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """basis: engine (a preview), account (no such stack yet: the program run against this account's facts) or offline. cost is None where AWS bills nothing."""

    stack: str
    basis: str
    region: str | None
    planned: tuple[Planned, ...]
    cost: Cost | None
    said: tuple[str, ...] = ()

    @property
    def changes(self) -> Mapping[str, int]:
        found: Counter[str] = Counter()
        for item in self.planned:
            found[item.op] += item.count
        return dict(found)


def plan(stack: str | target.Target, *, offline: bool = False, folder: Path | None = None, progress: Progress = lambda _: None) -> Plan:
    """What `up` would do. offline: needs neither account nor engine, and takes the instance types' facts from a dated list.

    Raises BadInput where the program refuses the stack, in its own words; AwsError and Refused where account or engine can't be asked.
    """
    aim = stack if isinstance(stack, target.Target) else target.read(stack, folder)
    on_aws = aim.settings.cluster.kind == "create"
    region = aim.region or (None if not on_aws else "us-west-2" if offline else aim.aws().region)
    cost = cost_of(aim.settings, region) if on_aws and region else None
    if offline:
        progress("the program, without an account")
        facts, known = imagined(aim.settings, region or "us-west-2")
        recorded = recording.record(aim, facts, known)
        return Plan(aim.name, "offline", region, _counted([(item.urn, item.type, "create") for item in recorded.resources if item.custom]), cost)
    engine = _engine(aim)
    if engine is not None and engine.outputs() is not None:
        progress("the engine's preview")
        steps: dict[str, tuple[str, str, str]] = {}
        engine.preview(on_step=lambda urn, kind, op: steps.setdefault(urn, (urn, kind, op)))
        return Plan(aim.name, "engine", region, _counted(list(steps.values())), cost)
    if not on_aws:
        facts, known = imagined(aim.settings, "us-west-2")
    else:
        progress("the account")
        facts, known = looked_up(aim)
    progress("the program, without the engine")
    recorded = recording.record(aim, facts, known)
    return Plan(aim.name, "account", region, _counted([(item.urn, item.type, "create") for item in recorded.resources if item.custom]), cost, recorded.said)


def cost_of(stack: config.Stack, region: str) -> Cost:
    """By prices.json; see :func:`prices.hourly` for what is not in it."""
    table = prices.table()
    bill = prices.hourly(stack, region, table)
    # After the stop the GPU nodes are gone, their disks with them; the rest goes on.
    bare = prices.hourly(dataclasses.replace(stack, gpu=dataclasses.replace(stack.gpu, nodes=0, min_nodes=None, max_nodes=None)), region, table)
    delay = stack.budget.stop_delay
    gpu_hours = WEEKEND if delay is None else min(delay, WEEKEND)

    def hours(span: datetime.timedelta) -> float:
        return span.total_seconds() / 3600

    gpu = bill.usd_hour - bare.usd_hour
    return Cost(
        lines=bill.lines,
        an_hour=bill.usd_hour,
        stop_after=stack.budget.stop_after,
        until_stop=None if delay is None else round(bill.usd_hour * hours(delay), 2),
        after_stop_an_hour=bare.usd_hour,
        weekend=round(gpu * hours(gpu_hours) + bare.usd_hour * hours(WEEKEND), 2),
        a_month=round(bill.usd_hour * prices.HOURS_A_MONTH, 2),
        unknown=bill.unknown,
        as_of=bill.as_of,
    )


def imagined(stack: config.Stack, region: str) -> tuple[fit.Facts, dict[str, fit.Instance]]:
    """An account that has all the stack needs, with the instance types of the list. Raises BadInput for a type that is not in it."""
    listed: Mapping[str, Sequence[Any]] = json.loads(INSTANCES.read_text(encoding="utf-8"))["types"]
    known = {
        name: fit.Instance(name, vcpus, gib, gpus, gpu_gib, efa, cards, (architecture,))
        for name, (vcpus, gib, gpus, gpu_gib, efa, cards, architecture) in listed.items()
    }
    for part, name in (("gpu", stack.gpu.instance_type), ("system", stack.system.instance_type)):
        if name not in known:
            key = f"{config.PROJECT}:{part}.instanceType = {name!r}"
            raise BadInput(f"{key} is not in the list that `plan --offline` uses (ops/instances.json); leave --offline out, to ask EC2")
    letters = sorted({"a", "b", "c", (stack.zone or "a")[-1]})
    zones = tuple(fit.Zone(f"{region}{letter}", f"imagined-az{i}") for i, letter in enumerate(letters, start=1))
    names = tuple(zone.name for zone in zones)
    family = stack.gpu.instance_type.split(".")[0]
    sizes = tuple(sorted(name for name, item in known.items() if name.startswith(f"{family}.") and item.efa_interfaces))
    gpu, system = known[stack.gpu.instance_type], known[stack.system.instance_type]
    return fit.Facts(ANY_ACCOUNT, "aws", region, gpu, system, zones, names, names, None, sizes), known


def looked_up(aim: target.Target) -> tuple[fit.Facts, dict[str, fit.Instance]]:
    """The account's own facts. Raises BadInput for a type that the region does not have, or for another account than the stack's."""
    aws = aim.aws()
    caller = aws.identity()
    for finding in checks.account(aim, aws, caller["Account"], caller["Arn"], None):
        if finding.level == "fail":
            raise BadInput(f"{finding.what}; {finding.do}")
    facts, missing = checks.gather(aim, aws, caller["Account"], caller["Arn"])
    if facts is None:
        raise BadInput("; ".join(f"{finding.what}; {finding.do}" for finding in missing))
    return facts, {facts.gpu.name: facts.gpu, facts.system.name: facts.system}


def _engine(aim: target.Target) -> Engine | None:
    """None where there is no engine: then nothing can be up that it knows of."""
    try:
        return Engine(aim)
    except Refused:
        return None


def _counted(steps: Sequence[tuple[str, str, str]]) -> tuple[Planned, ...]:
    """(URN, type, op) as counts by part, kind and op, in the order of the program's parts."""
    titles = [part.title for part in phases.PARTS]
    found: Counter[tuple[str, str, str]] = Counter()
    for urn, kind, op in steps:
        if op in SAME or kind.startswith(COMPONENTS):
            continue
        part = phases.part_of(urn)
        found[(part.title if part else "other", kind.rsplit(":", 1)[-1], "replace" if "replace" in op else op)] += 1
    order = {title: number for number, title in enumerate(titles)}
    rows = sorted(found.items(), key=lambda row: (order.get(row[0][0], len(order)), row[0][1], row[0][2]))
    return tuple(Planned(part, kind, op, count) for (part, kind, op), count in rows)
