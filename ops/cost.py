"""What a stack has cost so far, costs an hour, and what each run cost: from when AWS made things, the runs' records, and a dated price table."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import config
import naming
import prices
from ops import ec2, pricelist, target
from ops.aws import Aws, AwsError, tags_of
from ops.errors import BadInput, Refused

# training/record.py's: run.json's schema, the names of its files.
RUN_SCHEMA, RUN_FILE, METRICS_FILE = 1, "run.json", "metrics.jsonl"
# The last lines of metrics.jsonl are enough, and it may be long.
METRICS_TAIL = 64 * 1024
# The newest runs; a bucket of a year has hundreds.
MOST_RUNS = 50
NOT_COUNTED = ("data transfer", "NAT per GB", "what the bucket holds", "logs", "tax")
LAUNCHED, ENDED = re.compile(r"Launching a new EC2 instance: (i-[0-9a-f]+)"), re.compile(r"Terminating EC2 instance: (i-[0-9a-f]+)")

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Part:
    """Something billed by the hour. hours: of all that there were, added up; running: how many there are now; usd_hour: of one, None where not known."""

    what: str
    hours: float
    running: int
    usd_hour: float | None

    @property
    def usd(self) -> float:
        return self.hours * (self.usd_hour or 0.0)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's share: the hours of its attempts at the whole stack's price. None where the record does not say enough."""

    name: str
    outcome: str
    started: str
    hours: float
    tokens: int | None
    usd: float | None
    usd_per_million_tokens: float | None


@dataclasses.dataclass(frozen=True)
class Spent:
    """Until ``until``; since: when the first part was made. unknown: what has no price, so that all sums are too low; problems: what could not be asked."""

    stack: str
    account: str
    region: str
    since: datetime.datetime | None
    until: datetime.datetime
    parts: tuple[Part, ...]
    runs: tuple[Run, ...]
    unknown: tuple[str, ...]
    problems: tuple[str, ...]
    prices_as_of: str
    not_counted: tuple[str, ...] = NOT_COUNTED

    @property
    def usd(self) -> float:
        return round(sum(part.usd for part in self.parts), 4)

    @property
    def usd_hour(self) -> float:
        """Now."""
        return round(sum(part.running * (part.usd_hour or 0.0) for part in self.parts), 4)

    @property
    def tokens(self) -> int:
        return sum(run.tokens or 0 for run in self.runs)

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Of all that the stack cost, idle hours included."""
        return self.usd / self.tokens * 1e6 if self.tokens else None


def so_far(stack: str | target.Target, *, folder: Path | None = None, now: datetime.datetime | None = None, progress: Progress = lambda _: None) -> Spent:
    """What the stack has cost until now. Raises BadInput for a stack without AWS, and AwsError where the account can't be asked."""
    aim = stack if isinstance(stack, target.Target) else target.read(stack, folder)
    if aim.settings.cluster.kind == "existing":
        raise BadInput(f"stack {aim.name} runs on an existing cluster: AWS bills nothing for it")
    until = now or datetime.datetime.now(datetime.UTC)
    aws = aim.aws()
    account = aws.identity()["Account"]
    if aim.allowed_accounts and account not in aim.allowed_accounts:
        raise BadInput(
            f"these credentials are of account {account}, not of {', '.join(aim.allowed_accounts)} (aws:allowedAccountIds); use the right AWS_PROFILE"
        )
    deployment = naming.deployment_id(config.PROJECT, aim.name, account, aws.region)
    found = prices.of_region(prices.table(), aws.region)
    table: Mapping[str, Any] = found or {"hourly": {}, "monthly": {}, "instances": {}, "asOf": prices.table()["asOf"]}
    progress("what runs, and since when")
    uses, problems = _uses(aws, aim, deployment, until)
    parts = tuple(_priced(uses, table, aim.settings, until))
    progress("the runs")
    bill = prices.hourly(aim.settings, aws.region, prices.table())
    runs, more = _runs(aws, aim, deployment, bill.usd_hour if found else None, until)
    unknown = [part.what for part in parts if part.usd_hour is None] or ([] if found else [f"region {aws.region}"])
    since = min((use.start for use in uses), default=None)
    return Spent(aim.name, account, aws.region, since, until, parts, tuple(runs), tuple(dict.fromkeys(unknown)), (*problems, *more), str(table["asOf"]))


def receipt(before: Spent, ended: datetime.datetime) -> Spent:
    """The bill of a stack that is gone: what :func:`so_far` said before the destroy, with all that ran then counted until ``ended``.

    A part that went earlier in the destroy is counted some minutes too long, never too short.
    """
    more = max(0.0, (ended - before.until).total_seconds() / 3600)
    parts = tuple(dataclasses.replace(part, hours=part.hours + more * part.running, running=0) for part in before.parts)
    return dataclasses.replace(before, until=max(ended, before.until), parts=parts)


@dataclasses.dataclass(frozen=True)
class _Use:
    """One thing's time. end is None while it runs; id: of an instance, which may be told of twice."""

    what: str
    start: datetime.datetime
    end: datetime.datetime | None
    size: float = 1.0
    id: str = ""

    def hours(self, until: datetime.datetime) -> float:
        return max(0.0, ((self.end or until) - self.start).total_seconds() / 3600) * self.size


def _uses(aws: Aws, aim: target.Target, deployment: str, until: datetime.datetime) -> tuple[list[_Use], list[str]]:
    found: list[_Use] = []
    problems: list[str] = []
    tags = {"deployment": deployment}
    for name, look in (("control plane and past nodes", _cluster), ("nodes", _nodes), ("NAT gateway", _nat), ("FSx", _fsx)):
        try:
            found += look(aws, aim, tags)
        except AwsError as error:
            if error.hopeless:
                raise
            problems.append(f"{name}: {error}")
    # An instance that runs is told of by its group's history and by EC2, which knows its type; the history alone knows those that are gone.
    nodes: dict[str, _Use] = {}
    for use in found:
        if use.id:
            before = nodes.get(use.id, use)
            nodes[use.id] = dataclasses.replace(use, end=before.end or use.end)
    every = [*(use for use in found if not use.id), *nodes.values()]
    return [use for use in every if use.start <= until], problems


def _cluster(aws: Aws, aim: target.Target, tags: Mapping[str, str]) -> Iterator[_Use]:
    """The control plane, and every instance that its node groups ever launched, by the scaling groups' history (six weeks of it)."""
    name = aim.prefix
    try:
        cluster = aws.ask("eks", "describe_cluster", name=name)["cluster"]
    except AwsError as error:
        if error.code == "ResourceNotFoundException":
            return
        raise
    if tags_of(cluster, "tags").get("deployment") != tags["deployment"]:
        return
    yield _Use("controlPlane", cluster["createdAt"], None)
    for group in aws.pages("eks", "list_nodegroups", "nodegroups", clusterName=name):
        found = aws.ask("eks", "describe_nodegroup", clusterName=name, nodegroupName=group)["nodegroup"]
        kinds = found.get("instanceTypes") or [aim.settings.gpu.instance_type]
        for scaling in found.get("resources", {}).get("autoScalingGroups", []):
            yield from history(aws.pages("autoscaling", "describe_scaling_activities", "Activities", AutoScalingGroupName=scaling["name"]), kinds[0])


def history(activities: Iterator[Mapping[str, Any]], instance_type: str) -> list[_Use]:
    """A scaling group's activities as the times of its instances."""
    began: dict[str, datetime.datetime] = {}
    ended: dict[str, datetime.datetime] = {}
    for activity in activities:
        said = activity.get("Description", "")
        if (match := LAUNCHED.search(said)) and activity.get("StatusCode") in ("Successful", "InProgress", "WaitingForInstanceId", "PreInService"):
            began[match[1]] = activity["StartTime"]
        elif match := ENDED.search(said):
            ended[match[1]] = activity.get("EndTime") or activity["StartTime"]
    return [_Use(instance_type, start, ended.get(id), id=id) for id, start in began.items()]


def _nodes(aws: Aws, aim: target.Target, tags: Mapping[str, str]) -> Iterator[_Use]:
    for item in ec2.running(aws, tags, states=("pending", "running")):
        yield _Use(item["InstanceType"], item["LaunchTime"], None, id=item["InstanceId"])


def _nat(aws: Aws, aim: target.Target, tags: Mapping[str, str]) -> Iterator[_Use]:
    """With its address, which EC2 gives no date of."""
    for item in aws.pages("ec2", "describe_nat_gateways", "NatGateways", Filters=ec2.tag_filters(tags)):
        if item.get("State") != "failed":
            gone = item.get("DeleteTime")
            yield _Use("natGateway", item["CreateTime"], gone)
            yield _Use("publicIpv4", item["CreateTime"], gone)


def _fsx(aws: Aws, aim: target.Target, tags: Mapping[str, str]) -> Iterator[_Use]:
    if aim.settings.storage.fsx is None:
        return
    for item in aws.pages("fsx", "describe_file_systems", "FileSystems"):
        if tags_of(item).get("deployment") == tags["deployment"]:
            yield _Use("FSx GiB", item["CreationTime"], None, float(item["StorageCapacity"]))


def _priced(uses: Sequence[_Use], table: Mapping[str, Any], stack: config.Stack, until: datetime.datetime) -> Iterator[Part]:
    """Each node with the disk that it has."""
    month: Mapping[str, float] = table["monthly"]
    prepaid = stack.gpu.capacity.kind == "capacity-block"
    for what in dict.fromkeys(use.what for use in uses):
        mine = [use for use in uses if use.what == what]
        hours, running = sum(use.hours(until) for use in mine), sum(use.end is None for use in mine)
        if what == "FSx GiB":
            price = month["fsxScratchGib"] / prices.HOURS_A_MONTH if "fsxScratchGib" in month else None
            yield Part(what, hours, int(sum(use.size for use in mine if use.end is None)), price)
        elif what in ("controlPlane", "natGateway", "publicIpv4"):
            yield Part(what, hours, running, table["hourly"].get(what))
        else:
            paid = prepaid and what == stack.gpu.instance_type
            yield Part(f"{what} (capacity block, paid in advance)" if paid else what, hours, running, 0.0 if paid else table["instances"].get(what))
            yield Part(f"disk of {what}", hours, running, _disk(what, month, stack))


def _disk(instance_type: str, month: Mapping[str, float], stack: config.Stack) -> float | None:
    if not {"gp3Gib", "gp3Mibps"} <= set(month):
        return None
    if instance_type == stack.gpu.instance_type:
        return (stack.gpu.disk_gib * month["gp3Gib"] + (prices.GPU_DISK_MIBPS - prices.GP3_FREE_MIBPS) * month["gp3Mibps"]) / prices.HOURS_A_MONTH
    return stack.system.disk_gib * month["gp3Gib"] / prices.HOURS_A_MONTH


def _runs(aws: Aws, aim: target.Target, deployment: str, usd_hour: float | None, until: datetime.datetime) -> tuple[list[Run], list[str]]:
    """The newest runs under the stack's prefix; none, and why, where the bucket can't be read."""
    try:
        bucket = aim.settings.storage.bucket or _bucket(aws, aim, deployment)
        if bucket is None:
            return [], []
        prefix = f"{aim.settings.storage.prefix}/"
        names = [item["Prefix"] for item in aws.pages("s3", "list_objects_v2", "CommonPrefixes", Bucket=bucket, Prefix=prefix, Delimiter="/")]
        with ThreadPoolExecutor(max_workers=8) as pool:
            found = list(pool.map(lambda name: _run(aws, bucket, name, usd_hour, until), names))
    except AwsError as error:
        if error.hopeless:
            raise
        return [], [f"runs: {error}"]
    runs = sorted((run for run in found if run), key=lambda run: run.started, reverse=True)
    return runs[:MOST_RUNS], []


def _bucket(aws: Aws, aim: target.Target, deployment: str) -> str | None:
    for item in aws.pages("s3", "list_buckets", "Buckets"):
        if item["Name"].startswith(f"{aim.prefix}-"):
            with contextlib.suppress(AwsError):  # one that may not be read is not this stack's
                if tags_of(aws.ask("s3", "get_bucket_tagging", Bucket=item["Name"]), "TagSet").get("deployment") == deployment:
                    return str(item["Name"])
    return None


def _run(aws: Aws, bucket: str, prefix: str, usd_hour: float | None, until: datetime.datetime) -> Run | None:
    text = _object(aws, bucket, prefix + RUN_FILE)
    try:
        record = json.loads(text) if text else None
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("schema") != RUN_SCHEMA:
        return None
    return run_of(record, _object(aws, bucket, prefix + METRICS_FILE, tail=METRICS_TAIL) or "", usd_hour, until)


def run_of(record: Mapping[str, Any], metrics: str, usd_hour: float | None, until: datetime.datetime) -> Run:
    """A run of its run.json and the end of its metrics.jsonl. usd_hour: what the stack costs an hour while it runs."""
    spans = []
    for attempt in record.get("attempts", []):
        start, end = _time(attempt.get("started")), _time(attempt.get("ended"))
        if start:
            spans.append(max(0.0, ((end or until) - start).total_seconds() / 3600))
    hours = sum(spans)
    tokens = None
    for line in reversed(metrics.splitlines()):
        with contextlib.suppress(ValueError, AttributeError):
            value = json.loads(line).get("tokens")
            if isinstance(value, int):
                tokens = value
                break
    usd = None if usd_hour is None else round(hours * usd_hour, 4)
    per = usd / tokens * 1e6 if usd is not None and tokens else None
    return Run(str(record.get("run")), str(record.get("outcome")), str(record.get("started")), hours, tokens, usd, per)


def _time(text: Any) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(str(text).replace("Z", "+00:00")) if text else None
    except ValueError:
        return None


def _object(aws: Aws, bucket: str, key: str, tail: int | None = None) -> str | None:
    try:
        more = {"Range": f"bytes=-{tail}"} if tail else {}
        return str(aws.ask("s3", "get_object", Bucket=bucket, Key=key, **more)["Body"].read().decode(errors="replace"))
    except AwsError as error:
        if error.code in ("NoSuchKey", "404", "InvalidRange"):
            return None
        raise


@dataclasses.dataclass(frozen=True)
class Refreshed:
    """What the price list API said of a region; missing: what it has no price of. file: where it is kept now."""

    region: str
    as_of: str
    changed: Mapping[str, tuple[float | None, float]]
    missing: tuple[str, ...]
    file: Path


def refresh(stack: str | target.Target, *, folder: Path | None = None, file: Path | None = None, progress: Progress = lambda _: None) -> Refreshed:
    """Asks the price list API about the stack's region and keeps the answer in prices.json, beside what is there of other regions.

    Raises AwsError where the API may not be asked, and Refused where it has no price of the stack's own types; the table is untouched then.
    """
    aim = stack if isinstance(stack, target.Target) else target.read(stack, folder)
    aws, place = aim.aws(), file or prices.TABLE
    whole = json.loads(place.read_text(encoding="utf-8"))
    before = prices.of_region(whole, aws.region) or {"hourly": {}, "monthly": {}, "instances": {}}
    own = [aim.settings.gpu.instance_type, aim.settings.system.instance_type]
    types = list(dict.fromkeys([*own, *whole["instances"]]))
    progress(f"{len(types)} instance types and {len(pricelist.HOURLY) + len(pricelist.MONTHLY)} other prices of {aws.region}")
    table = pricelist.region_table(aws, aws.region, types)
    missing = [name for name in own if name not in table["instances"]]
    if missing:
        raise Refused(f"the price list API has no on-demand price of {', '.join(missing)} in {aws.region}; {place.name} is unchanged")
    whole.setdefault("byRegion", {})[aws.region] = table
    _write(place, whole)
    changed = {
        name: (before[section].get(name), price)
        for section in ("hourly", "monthly", "instances")
        for name, price in table[section].items()
        if before[section].get(name) != price
    }
    unsaid = [name for section in ("hourly", "monthly", "instances") for name in before[section] if name not in table[section]]
    return Refreshed(aws.region, table["asOf"], changed, tuple(unsaid), place)


def _write(place: Path, table: Mapping[str, Any]) -> None:
    handle, draft = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump(table, out, indent=2)
            out.write("\n")
        os.chmod(draft, place.stat().st_mode & 0o7777)
        os.replace(draft, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
