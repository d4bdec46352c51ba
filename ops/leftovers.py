"""Is it gone? Everything in the account that a stack, or any stack of this project, could have left; what it costs, and how to be rid of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import config
import naming
import prices
from ops import left_kinds, target
from ops.aws import Aws, AwsError
from ops.errors import BadInput
from ops.left_kinds import Leftover, Scope

WORKERS = 8
EVERY_CLUSTER = f"{config.PROJECT}-*"

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Found:
    """What is there. problems: what could not be asked, so that an empty list is no proof; where: account and regions asked."""

    stack: str | None
    account: str
    regions: tuple[str, ...]
    items: tuple[Leftover, ...]
    problems: tuple[str, ...]
    prices_as_of: str

    @property
    def left(self) -> tuple[Leftover, ...]:
        """What should not be there: all but what the stack file keeps on purpose."""
        return tuple(item for item in self.items if not item.kept)

    @property
    def alive(self) -> tuple[str, ...]:
        """Clusters that run: their stacks are up rather than left."""
        return tuple(item.name for item in self.items if item.kind == "EKS cluster" and item.note in ("ACTIVE", "CREATING", "UPDATING"))

    @property
    def usd_month(self) -> float:
        """What is known to be billed in a month if nothing is done, kept things included."""
        return round(sum(item.usd_month or 0.0 for item in self.items), 2)

    @property
    def unpriced(self) -> tuple[Leftover, ...]:
        return tuple(item for item in self.items if item.usd_month is None)

    @property
    def clean(self) -> bool:
        return not self.left and not self.problems


def find(stack: str | target.Target, *, folder: Path | None = None, progress: Progress = lambda _: None) -> Found:
    """What a stack has in its account and region. Raises BadInput for a stack without a file or without AWS, and AwsError where nothing can be asked."""
    aim = stack if isinstance(stack, target.Target) else target.read(stack, folder)
    if aim.settings.cluster.kind == "existing":
        raise BadInput(f"stack {aim.name} runs on an existing cluster and has nothing in AWS")
    aws = aim.aws()
    account = aws.identity()["Account"]
    _right_account(aim, account)
    deployment = naming.deployment_id(config.PROJECT, aim.name, account, aws.region)
    scope = Scope(deployment, aim.name, aim.prefix)
    items, problems = _region(aws, scope, {**left_kinds.REGIONAL, **left_kinds.GLOBAL}, progress)
    kept = [dataclasses.replace(item, kept=True) if _keeps(item, aim.settings) else item for item in items]
    return Found(aim.name, account, (aws.region,), tuple(_sorted(kept)), tuple(problems), prices.table()["asOf"])


def find_all(*, folder: Path | None = None, progress: Progress = lambda _: None) -> Found:
    """What any stack of this project has in the account of the credentials at hand, in every region that is open to it. Raises AwsError."""
    settings = _files(folder)
    aws = Aws(next((aim.region for aim in settings.values() if aim.region), None))
    account = aws.identity()["Account"]
    regions = sorted(region["RegionName"] for region in aws.ask("ec2", "describe_regions")["Regions"])
    scope = Scope(None, None, EVERY_CLUSTER)
    items: list[Leftover] = []
    problems: list[str] = []
    # Regions one after the other: each asks with all workers, and the list is as long as AWS's.
    for region in regions:
        kinds = {**left_kinds.REGIONAL, **(left_kinds.GLOBAL if region == regions[0] else {})}
        found, unsaid = _region(aws.elsewhere(region), scope, kinds, lambda text, region=region: progress(f"{region}: {text}"))  # type: ignore[misc]
        items += found
        problems += unsaid
    kept = []
    for item in items:
        aim = settings.get(item.stack)
        kept.append(dataclasses.replace(item, kept=True) if aim is not None and _keeps(item, aim.settings) else item)
    return Found(None, account, tuple(regions), tuple(_sorted(kept)), tuple(problems), prices.table()["asOf"])


def _files(folder: Path | None) -> dict[str, target.Target]:
    """The stacks that have a file which can be read; the others have no say in what is kept."""
    found: dict[str, target.Target] = {}
    for name in target.known(folder):
        try:
            found[name] = target.read(name, folder)
        except BadInput:
            continue
    return found


def _right_account(aim: target.Target, account: str) -> None:
    if aim.allowed_accounts and account not in aim.allowed_accounts:
        allowed = ", ".join(aim.allowed_accounts)
        raise BadInput(f"these credentials are of account {account}, and aws:allowedAccountIds of {aim.file.name} names {allowed}; use the right AWS_PROFILE")


def _keeps(item: Leftover, settings: config.Stack) -> bool:
    """A bucket of checkpoints that the stack file wants to outlive the stack."""
    return item.kind == "bucket" and item.marked and settings.storage.on_destroy != "delete"


def _region(aws: Aws, scope: Scope, kinds: Mapping[str, left_kinds.Finder], progress: Progress) -> tuple[list[Leftover], list[str]]:
    """All kinds at the same time; each thing once. What may not be asked is a problem, not an end."""
    price = left_kinds.Prices(prices.of_region(prices.table(), aws.region))
    items, problems = _collect("VPCs", left_kinds.vpcs, aws, scope, price)
    scope = dataclasses.replace(scope, vpcs=tuple(item.id for item in items))
    with ThreadPoolExecutor(max_workers=WORKERS) as pool:
        started = {pool.submit(_collect, name, finder, aws, scope, price): name for name, finder in kinds.items()}
        try:
            for done in as_completed(started):
                found, unsaid = done.result()
                items += found
                problems += unsaid
                progress(", ".join(name for future, name in started.items() if not future.done()) or "the answers")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return items, problems


def _collect(name: str, finder: left_kinds.Finder, aws: Aws, scope: Scope, price: left_kinds.Prices) -> tuple[list[Leftover], list[str]]:
    found: list[Leftover] = []
    try:
        found.extend(finder(aws, scope, price))
    except AwsError as error:
        if error.kind == "credentials" or (error.kind == "network" and not found):
            raise
        return found, [f"{name}: {error}"]
    return found, []


def _sorted(items: Iterable[Leftover]) -> list[Leftover]:
    """What bills most first; then what is not known, then by kind and name."""
    return sorted(items, key=lambda item: (item.kept, -(item.usd_month or 0.0), item.usd_month is not None, item.kind, item.name, item.id))


def by_stack(items: Sequence[Leftover]) -> dict[str, list[Leftover]]:
    found: dict[str, list[Leftover]] = {}
    for item in items:
        found.setdefault(item.stack, []).append(item)
    return found
