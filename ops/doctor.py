"""Can this stack be built, here and now: everything that would stop it, found in under a minute and before anything is made."""

from __future__ import annotations

import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import config
import prices
from config import PROJECT
from ops import checks, image, pins, probe, target, tools, zones
from ops.aws import Aws, AwsError
from ops.errors import BadInput, Refused
from ops.findings import Finding, failed, sort
from ops.zones import RegionRank, ZoneRank

WORKERS = 8

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Report:
    """What doctor found: the worst finding first. account, region and the ranks are empty for a stack on an existing cluster."""

    stack: str
    account: str
    region: str
    findings: tuple[Finding, ...]
    zones: tuple[ZoneRank, ...] = ()
    regions: tuple[RegionRank, ...] = ()
    usd_hour: float | None = None
    prices_as_of: str | None = None
    pinned: pins.Pinned | None = None
    probed: tuple[probe.Probed, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not failed(self.findings)


def examine(
    name: str,
    *,
    pin: bool = False,
    probing: bool = False,
    regions: Sequence[str] = (),
    folder: Path | None = None,
    progress: Progress = lambda _: None,
) -> Report:
    """Looks at the stack's file, this machine and the account.

    pin: writes the pins into the stack file, unless a check fails; probing: makes and cancels an on-demand reservation; regions: ranks these as well.
    progress: told what is being looked at, from this thread. Raises BadInput for a stack file that is wrong, and AwsError where the account can't be asked.
    """
    began = time.monotonic()
    aim = target.read(name, folder, keep_pins=not pin)
    if aim.settings.cluster.kind == "existing":
        return _on_a_cluster(aim, pin, probing, regions, began)
    progress("whose account")
    aws = aim.aws()
    caller = aws.identity()
    number, arn = caller["Account"], caller["Arn"]
    found = [*checks.account(aim, aws, number, arn, os.environ.get("AWS_PROFILE"))]
    if failed(found):
        # In another account than the stack's every further answer would be about the wrong one.
        return Report(aim.name, number, aws.region, tuple(sort(found)), seconds=time.monotonic() - began)
    progress("instance types and zones")
    facts, missing = checks.gather(aim, aws, number, arn)
    found += missing
    if facts is None:
        found += tools.findings()
        return Report(aim.name, number, aws.region, tuple(sort(found)), seconds=time.monotonic() - began)
    context = checks.Context(aim, aws, number, arn, facts, datetime.datetime.now(datetime.UTC))
    ranked: list[ZoneRank] = []
    compared: list[RegionRank] = []

    def rank_zones(_: checks.Context) -> list[Finding]:
        scores = zones.spot_scores(aws, facts.gpu.name, aim.settings.gpu.size[1], [aws.region], by_zone=True)
        ranked.extend(zones.rank(facts.zones, facts.gpu_zones, facts.system_zones, scores, aim.settings.zone))
        return [] if pin and not aim.settings.zone else _zone_findings(ranked, aim)

    def rank_regions(_: checks.Context) -> list[Finding]:
        compared.extend(zones.compare(aws, aim.settings, list(dict.fromkeys((aws.region, *regions))), context.tags))
        return []

    loose: list[tuple[str, checks.Check]] = [] if pin else [("pins", _unpinned)]
    jobs: list[tuple[str, checks.Check]] = [*checks.ALL, *loose, ("zones", rank_zones), ("image", _image), ("tools", lambda _: tools.findings())]
    if regions:
        jobs.append(("regions", rank_regions))
    found += _all(jobs, context, progress)
    bill = prices.hourly(aim.settings, aws.region, prices.table())
    probed: list[probe.Probed] = []
    if probing:
        progress("capacity (a reservation is made and cancelled)")
        probed, said = _probe(context, ranked)
        found += said
    pinned = None
    if pin:
        progress("pins")
        pinned, said = _pin(context, _best(ranked, probed), failed(found))
        found += said
    return Report(
        stack=aim.name,
        account=number,
        region=aws.region,
        findings=tuple(sort(found)),
        zones=tuple(ranked),
        regions=tuple(compared),
        usd_hour=bill.usd_hour,
        prices_as_of=bill.as_of,
        pinned=pinned,
        probed=tuple(probed),
        seconds=time.monotonic() - began,
    )


def _all(jobs: Sequence[tuple[str, checks.Check]], context: checks.Context, progress: Progress) -> list[Finding]:
    """Runs the checks at the same time; findings in the order of the jobs. What may not be asked is a finding, what makes all of them pointless is raised."""
    found: dict[str, list[Finding]] = {}
    with ThreadPoolExecutor(max_workers=WORKERS) as pool:
        started = {pool.submit(_one, name, check, context): name for name, check in jobs}
        try:
            for done in as_completed(started):
                found[started[done]] = done.result()
                left = [name for future, name in started.items() if not future.done()]
                progress(", ".join(left) or "the answers")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [finding for name, _ in jobs for finding in found[name]]


def _one(name: str, check: checks.Check, context: checks.Context) -> list[Finding]:
    try:
        return check(context)
    except AwsError as error:
        if error.hopeless:
            raise
        return [Finding(name, "unknown", f"could not be checked: {error}")]


def _zone_findings(ranked: Sequence[ZoneRank], aim: target.Target) -> list[Finding]:
    good = [zone.name for zone in ranked if zone.fits]
    if not good:
        return []  # fit.problems says so, with the way out
    if aim.settings.zone:
        return [Finding("zone", "ok", f"{aim.settings.zone} is chosen; able: {', '.join(good)}")]
    why = "`up` takes the first by name and keeps it; EFA does not cross zones"
    return [Finding("zone", "note", f"no zone is chosen; able: {', '.join(good)}", why, f"`python -m ops doctor {aim.name} --pin` writes {good[0]} down")]


def _unpinned(context: checks.Context) -> list[Finding]:
    """The program says the same at `up`; here it can still be changed."""
    kept = context.stack.pins
    loose = [what for what, pin in (("AMI release", kept.ami_release), ("image digest", kept.image_digest or context.stack.ray.image)) if not pin]
    loose += [f"add-on {name}" for name in pins.wanted_addons(context.stack) if name not in kept.addons]
    if not loose:
        return [Finding("pins", "ok", "AMI release, add-ons and image are pinned")]
    why = "a stack made anew next week would get other versions"
    return [Finding("pins", "note", f"not pinned: {', '.join(loose)}", why, f"`python -m ops doctor {context.target.name} --pin` writes them down")]


def _image(context: checks.Context) -> list[Finding]:
    return image_findings(context.stack, context.aws)


def image_findings(stack: config.Stack, aws: Aws | None) -> list[Finding]:
    """Can the training image be had, and is it the pinned one?"""
    try:
        found = image.digest(stack.image, aws)
    except Refused as error:
        if isinstance(error, AwsError) and error.hopeless:
            raise
        level = "unknown" if isinstance(error, (AwsError, image.Unreachable)) else "fail"
        what, _, do = str(error).partition("; ")
        return [Finding("image", level, what, "pods would wait for it for ever (ImagePullBackOff)", do)]
    pinned = "" if "@" in stack.image else ", by a tag"
    return [Finding("image", "ok", f"{stack.image} is there{pinned}" + (f" ({found[:19]}...)" if pinned else ""))]


def _best(ranked: Sequence[ZoneRank], probed: Sequence[probe.Probed]) -> str | None:
    """The zone that has just shown capacity, else the first of those that fit."""
    return next((answer.zone for answer in probed if answer.capacity), None) or next((zone.name for zone in ranked if zone.fits), None)


def _probe(context: checks.Context, ranked: Sequence[ZoneRank]) -> tuple[list[probe.Probed], list[Finding]]:
    stack = context.stack
    if stack.gpu.capacity.reserved:
        return [], [Finding("capacity", "note", "not probed: the stack's capacity is reserved already")]
    names = [stack.zone] if stack.zone else [zone.name for zone in ranked if zone.fits]
    probed = probe.probe(context.aws, context.facts.gpu.name, stack.gpu.size[1], names, context.target.tags(context.account, context.aws.region))
    found, there = [], any(answer.capacity for answer in probed)
    hint = "; a hint only for spot, which is another market" if stack.gpu.capacity.kind == "spot" else ""
    for answer in probed:
        if answer.capacity:
            what = f"{answer.said} in {answer.zone} now (reserved, and cancelled after {answer.seconds:.0f} s{hint})"
            found.append(Finding("capacity", "ok", what, "it may be gone when EKS is ready for nodes, 15 to 20 minutes into `up`"))
        else:
            ways = f"another zone (network.zone), fewer nodes, another type or region (`python -m ops doctor {context.target.name} --regions ...`), or later"
            level = "note" if there else "warn" if answer.capacity is False else "unknown"
            found.append(Finding("capacity", level, f"{answer.zone}: {answer.said}", "`up` would wait half an hour and fail", ways))
    return probed, found


def _pin(context: checks.Context, best: str | None, failures: Sequence[Finding]) -> tuple[pins.Pinned | None, list[Finding]]:
    if failures:
        why = "pins are written for a stack that can be built"
        return None, [Finding("pins", "warn", "nothing was pinned", why, "mend what failed, then --pin again")]
    file = context.target.file
    try:
        values, live, notes = pins.lookup(context.aws, context.target, context.tags["deployment"], best)
    except Refused as error:
        if isinstance(error, AwsError) and error.hopeless:
            raise
        return None, [Finding("pins", "fail", f"nothing was pinned: {error}", "without all pins the stack is not reproducible", "see above, then --pin again")]
    if context.stack.network.zone:
        values.pop("zone", None)  # the stack file says it already, and should not say it twice
    before, after = pins.write(file, values)
    found = [Finding("pins", "note", note) for note in notes]
    what = f"pins of {file.name} are {'written' if before != after else 'as they were'}"
    return pins.Pinned(file, before, after, live, tuple(notes)), [Finding("pins", "ok", what), *found]


def _on_a_cluster(aim: target.Target, pin: bool, probing: bool, regions: Sequence[str], began: float) -> Report:
    """A stack on a Kubernetes that exists needs no AWS."""
    asked = [option for option, given in (("--pin", pin), ("--probe", probing), ("--regions", bool(regions))) if given]
    if asked:
        raise BadInput(f"{' and '.join(asked)}: stack {aim.name} runs on an existing cluster ({PROJECT}:cluster.kind), so there is no AWS account to ask")
    found = [*tools.findings(needs_aws=False), *image_findings(aim.settings, None)]
    context = aim.settings.cluster.context
    found.append(Finding("cluster", "note", f"an existing cluster, kubeconfig context {context}: nothing of it is AWS's, so nothing else is checked"))
    return Report(aim.name, "", "", tuple(sort(found)), seconds=time.monotonic() - began)
