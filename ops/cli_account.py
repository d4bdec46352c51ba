"""The commands that ask an AWS account: doctor, plan, cost, leftovers."""

from __future__ import annotations

import contextlib
import datetime
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.text import Text

from ops import cost as costs
from ops import doctor as doctors
from ops import errors, sweep, target
from ops import leftovers as left
from ops import plan as plans
from ops.aws import Aws
from ops.cli import JsonOption, StackArgument, YesOption
from ops.engine import Engine
from ops.errors import Attention, BadInput, Refused
from ops.left_kinds import Leftover
from ops.output import Output, duration, plain, usd

# A longer list is summed up; --json has all of it.
MOST_ROWS = 40
MARKS = {"fail": "FAIL", "warn": "warn", "unknown": "?", "note": "note", "ok": "ok"}
STYLES = {"fail": "bold red", "warn": "yellow", "unknown": "yellow", "note": "cyan", "ok": "green"}


def register(app: typer.Typer) -> None:
    """Adds the commands to the app."""
    app.command(epilog=errors.help_text(errors.EXIT_LEFT))(doctor)
    app.command(epilog=errors.help_text(errors.EXIT_BUSY))(plan)
    app.command(epilog=errors.help_text())(cost)
    app.command(epilog=errors.help_text(errors.EXIT_LEFT, errors.EXIT_BUSY))(leftovers)


@contextlib.contextmanager
def working(output: Output) -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done, on stderr and only on a terminal."""
    if output.as_json or not output.progress.is_terminal:
        yield lambda _: None
        return
    with output.progress.status("asking AWS") as status:
        yield lambda text: status.update(f"asking AWS: {text}"[: output.progress.width - 4])


def doctor(
    stack: StackArgument,
    pin: Annotated[bool, typer.Option("--pin", help="Write zone, AMI release, add-on versions and image digest into the stack file.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="Make and cancel an on-demand reservation, to learn if there is capacity. Costs seconds of it.")
    ] = False,
    regions: Annotated[str, typer.Option("--regions", metavar="A,B,...", help="Compare these regions with the stack's own.")] = "",
    json: JsonOption = False,
) -> None:
    """Can the stack be built, here and now? Looks at the account, changes nothing in it, and says what to do.

    Identity, tools, rights, quotas, limits, zones, EFA, reservation, Kubernetes version, names, addresses, image, price. Ranks the zones.
    """
    output = Output(json)
    names = [name.strip() for name in regions.split(",") if name.strip()]
    with working(output) as progress:
        report = doctors.examine(stack, pin=pin, probing=probe, regions=names, progress=progress)
    output.result({**plain(report), "ok": report.ok})
    show_report(output, report)
    bad = [finding for finding in report.findings if finding.level == "fail"]
    if bad and not json:
        raise Attention(f"{len(bad)} thing{'s' * (len(bad) > 1)} would stop `up` of {stack}; see FAIL above")
    if bad:
        raise typer.Exit(errors.EXIT_LEFT)


def show_report(output: Output, report: doctors.Report) -> None:
    rows = []
    for finding in report.findings:
        text = finding.what
        text += f"\n  why: {finding.why}" if finding.why else ""
        text += f"\n  do:  {finding.do}" if finding.do and finding.do != finding.what else ""
        rows.append((Text(MARKS[finding.level], STYLES[finding.level]), finding.check, text))
    output.table("", "check", "finding", rows=rows)
    if report.zones:
        zones = [
            (zone.name, zone.id, _yes(zone.gpu), _yes(zone.system), _yes(zone.control_plane), _number(zone.score), "chosen" if zone.chosen else "")
            for zone in report.zones
        ]
        output.line()
        output.table("zone", "id", "GPU type", "system type", "control plane", "spot score", "", rows=zones, title="Zones, the best first", right=(5,))
    if report.regions:
        regions = [
            (
                region.name,
                f"{len(region.zones)}",
                f"{region.needed_vcpus}",
                "?" if region.free_vcpus is None else f"{region.free_vcpus:g}",
                "?" if region.usd_hour is None else usd(region.usd_hour),
                _number(region.score),
                "fits" if region.fits else region.problem or "quota too small",
            )
            for region in report.regions
        ]
        output.line()
        title = "Regions, the best first"
        output.table("region", "zones", "vCPUs needed", "free", "an hour", "spot score", "", rows=regions, title=title, right=(1, 2, 3, 4, 5))
    if report.pinned:
        output.line()
        title = f"Pins in {report.pinned.file.name}" + (", those of the running stack" if report.pinned.running else "")
        before, after = _flat(report.pinned.before), _flat(report.pinned.after)
        pins = [(key, after.get(key, "-"), "" if before.get(key) == after.get(key) else f"was {before.get(key, 'not set')}") for key in {**after, **before}]
        output.table("pin", "value", "", rows=pins, title=title)
    if report.zones:
        output.line()
        output.line("A spot score (1 to 10) is AWS's guess of how likely spot capacity is; it says nothing certain.", style="dim")
    output.line(f"{report.stack}: {_verdict(report)}, {duration(report.seconds)}")


def _verdict(report: doctors.Report) -> str:
    counts = {level: sum(finding.level == level for finding in report.findings) for level in MARKS}
    words = [f"{counts[level]} {word}" for level, word in (("fail", "failed"), ("warn", "warned"), ("unknown", "not known"), ("ok", "ok")) if counts[level]]
    price = f", {usd(report.usd_hour)} an hour" if report.usd_hour is not None else ""
    return f"{'can be built' if report.ok else 'can not be built yet'} ({', '.join(words)}){price}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _flat(pins: dict[str, object]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in pins.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": str(text) for name, text in value.items()}
        else:
            found[key] = str(value)
    return found


def plan(
    stack: StackArgument,
    offline: Annotated[bool, typer.Option("--offline", help="Without an account and without the engine: for a first look, before you have AWS.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What would `up` build, and what would it cost? Changes nothing.

    Of a stack that is up: what `up` would change (a preview of the engine). Of a new one: all that would be made, checked against your account.
    """
    output = Output(as_json)
    with working(output) as progress:
        found = plans.plan(stack, offline=offline, progress=progress)
    show_plan(output, found)
    output.result({**plain(found), "changes": found.changes})


def show_plan(output: Output, found: plans.Plan) -> None:
    basis = {
        "engine": "what `up` would change",
        "account": "a new stack, checked against your account" if found.region else "a new stack on your cluster",
        "offline": "a new stack in any account that allows it: zones, quota and prices of yours are not asked",
    }[found.basis]
    output.line(f"{found.stack}{f', {found.region}' if found.region else ''}: {basis}", style="bold")
    for text in found.said:
        output.line(f"  {text}", style="dim")
    output.line()
    rows: dict[tuple[str, str], list[str]] = {}
    for item in found.planned:
        rows.setdefault((item.part, item.op), []).append(f"{item.count} {item.kind}" if item.count > 1 else item.kind)
    if rows:
        creating = all(op == "create" for _, op in rows)
        table = [(part, *([] if creating else [op]), ", ".join(kinds)) for (part, op), kinds in rows.items()]
        output.table("part", *([] if creating else ["what"]), "resources", rows=table)
        output.line(f"{', '.join(f'{count} to {op}' for op, count in found.changes.items())}")
    else:
        output.line("nothing to change")
    if found.cost is None:
        output.line("AWS bills nothing for a stack on an existing cluster")
        return
    output.line()
    bill = found.cost
    lines = [(line.what, str(line.count), usd(line.usd_hour), usd(line.count * line.usd_hour)) for line in bill.lines]
    output.table("billed", "count", "an hour each", "an hour", rows=lines, right=(1, 2, 3))
    sums = [("an hour, with all nodes up", usd(bill.an_hour))]
    if bill.until_stop is not None:
        sums.append((f"until auto-stop ({bill.stop_after})", usd(bill.until_stop)))
        sums.append(("an hour after it: all but the GPU nodes", usd(bill.after_stop_an_hour)))
    sums.append(("forgotten from Friday 18:00 to Monday 09:00", usd(bill.weekend)))
    if bill.until_stop is None:
        sums.append(("a month; budget.stopAfter is not set, so nothing stops it", usd(bill.a_month)))
    output.line()
    output.table("cost", "", rows=sums, right=(1,))
    if bill.unknown:
        output.line(f"without {', '.join(bill.unknown)}, whose price is not known: `python -m ops cost {found.stack} --refresh`", style="yellow")
    output.line(f"prices of {bill.as_of}, on demand; not in it: {', '.join(costs.NOT_COUNTED)}", style="dim")


def cost(
    stack: StackArgument,
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask AWS's price list API about the stack's region, and keep the answer in prices.json.")] = False,
    as_json: JsonOption = False,
) -> None:
    """What has the stack cost so far, an hour, a run, and a million tokens?

    Hours are AWS's own: when it made the control plane, the nodes and the NAT gateway, and the scaling groups' history of nodes that are gone.
    """
    output = Output(as_json)
    with working(output) as progress:
        renewed = costs.refresh(stack, progress=progress) if refresh else None
        spent = costs.so_far(stack, progress=progress)
    if renewed:
        changes = [(name, "-" if old is None else f"{old:g}", f"{new:g}") for name, (old, new) in renewed.changed.items()]
        if changes:
            output.table("price", "was", "is", rows=changes, right=(1, 2), title=f"{renewed.file.name}: {renewed.region}, {renewed.as_of}")
        else:
            output.line(f"{renewed.file.name}: no price of {renewed.region} has changed")
        if renewed.missing:
            output.line(f"the price list API names no price of {', '.join(renewed.missing)}", style="yellow")
        output.line()
    show_spent(output, spent)
    output.result({**plain(spent), "usd": spent.usd, "usdHour": spent.usd_hour, "usdPerMillionTokens": spent.usd_per_million_tokens})


def show_spent(output: Output, spent: costs.Spent) -> None:
    """So far; the same for a receipt, where nothing runs any more."""
    if not spent.parts:
        output.line(f"nothing of {spent.stack} runs in account {spent.account}, {spent.region}: it costs nothing now")
    else:
        rows = [
            (
                part.what,
                f"{part.hours:,.2f}",
                str(part.running),
                "?" if part.usd_hour is None else usd(part.usd_hour),
                "?" if part.usd_hour is None else usd(part.usd),
            )
            for part in spent.parts
        ]
        output.table("billed", "hours", "now", "an hour each", "so far", rows=rows, right=(1, 2, 3, 4))
        since = f" since {spent.since:%Y-%m-%d %H:%M} UTC" if spent.since else ""
        rate = f", {usd(spent.usd_hour)} an hour now" if spent.usd_hour else ""
        output.line(f"{spent.stack}: {usd(spent.usd)}{since}{rate}", style="bold")
    if spent.runs:
        output.line()
        runs = [
            (
                run.name,
                run.outcome,
                f"{run.hours:.2f}",
                "-" if run.tokens is None else f"{run.tokens:,}",
                "?" if run.usd is None else usd(run.usd),
                "-" if run.usd_per_million_tokens is None else usd(run.usd_per_million_tokens),
            )
            for run in spent.runs
        ]
        output.table("run", "outcome", "hours", "tokens", "cost", "a million tokens", rows=runs, right=(2, 3, 4, 5))
        if spent.usd_per_million_tokens is not None:
            output.line(f"with all idle hours: {usd(spent.usd_per_million_tokens)} a million tokens")
    for problem in spent.problems:
        output.line(f"not asked: {problem}", style="yellow")
    if spent.unknown:
        output.line(f"without {', '.join(spent.unknown)}, whose price is not known: `python -m ops cost {spent.stack} --refresh`", style="yellow")
    output.line(f"prices of {spent.prices_as_of}, on demand; not in it: {', '.join(spent.not_counted)}", style="dim")


def leftovers(
    stack: Annotated[str, typer.Argument(metavar="STACK", help="Name of the stack: dev means Pulumi.dev.yaml.", show_default=False)] = "",
    everything: Annotated[bool, typer.Option("--all", help="Every stack of this project, in every region of the account.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Show what would be deleted, ask, and delete it: only what carries the stack's tags.")] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Is it gone? Lists what a stack has left in the account, since when, and what it costs a month.

    Asks AWS itself, not the state: by tags, by the stack's VPC, and by the cluster's name. Exits with 6 if there is anything, or if something could not be
    asked. A bucket that storage.onDestroy keeps is listed, and is no leftover.
    """
    if bool(stack) == everything:
        raise BadInput("name one stack, or say --all for every stack of this project")
    output = Output(as_json)
    with working(output) as progress:
        found = left.find_all(progress=progress) if everything else left.find(stack, progress=progress)
    if delete:
        found = _delete(output, found, yes)
    show_leftovers(output, found)
    output.result({**plain(found), "left": len(found.left), "usdMonth": found.usd_month, "clean": found.clean})
    if not found.clean:
        raise typer.Exit(errors.EXIT_LEFT)


def _delete(output: Output, found: left.Found, yes: bool) -> left.Found:
    """Shows, asks, deletes, and looks again."""
    stacks = {item.stack for item in found.left}
    files = {name: target.read(name) for name in stacks if name in target.known()}
    for aim in files.values():
        _not_managed(aim)
    good, not_ = sweep.deletable(found.left, frozenset(name for name, aim in files.items() if aim.settings.storage.on_destroy == "delete"))
    if not good:
        output.line("Nothing here may be deleted by this command.")
        return found
    output.table("kind", "name", "stack", "note", rows=[(item.kind, item.name, item.stack, item.note) for item in good], title="To be deleted, in this order")
    for item, why in not_:
        output.line(f"stays: {item.kind} {item.name}: {why}")
    _agree(output, found, len(good), yes)
    with contextlib.ExitStack() as held:
        for aim in files.values():
            with contextlib.suppress(Refused):  # without the engine no one else can be at work with it
                held.enter_context(Engine(aim).lock("leftovers --delete"))
        aws = files[found.stack].aws() if found.stack in files else Aws(found.regions[0])
        with working(output) as progress:
            swept = sweep.delete(aws, good, progress=progress)
    output.line(f"{len(swept.deleted)} deleted" + (f", {len(swept.refused)} not:" if swept.refused else ""))
    for item, why in swept.refused:
        output.line(f"  {item.kind} {item.name}: {why}")
    output.line()
    with working(output) as progress:
        return left.find(found.stack, progress=progress) if found.stack else left.find_all(progress=progress)


def _not_managed(aim: target.Target) -> None:
    """What the engine still manages is `down`'s to delete: it knows the order, and the state stays true."""
    try:
        resources = Engine(aim).resources() or []
    except Refused:
        return
    managed = [found for found in resources if found.get("custom") and not str(found.get("type", "")).startswith("pulumi:")]
    if managed:
        raise Attention(
            f"the state of {aim.name} still holds {len(managed)} resources: `python -m ops down {aim.name}` deletes them; --delete is for what is left then"
            f" (or after `pulumi stack rm --force {aim.name}`, if the state is of no more use)"
        )


def _agree(output: Output, found: left.Found, count: int, yes: bool) -> None:
    if yes:
        return
    if output.as_json or not sys.stdin.isatty():
        raise BadInput(f"--delete would delete {count} things for good; say --yes where nobody can be asked")
    if found.alive:
        name = found.stack or "all"
        said = typer.prompt(f"{', '.join(found.alive)} is running. Type {name} to delete it with all the rest")
        agreed = said.strip() == name
    else:
        agreed = typer.confirm(f"Delete these {count} things for good?")
    if not agreed:
        raise typer.Abort


def show_leftovers(output: Output, found: left.Found) -> None:
    now = datetime.datetime.now(datetime.UTC)
    whose = f"stack {found.stack}" if found.stack else "any stack of this project"
    where = found.regions[0] if len(found.regions) == 1 else f"{len(found.regions)} regions"
    if found.items:
        many = found.stack is None
        rows = [
            (item.kind, item.name, *([f"{item.stack}, {item.region}"] if many else []), _age(item, now), _month(item), _remark(item)) for item in found.items
        ]
        columns = ("kind", "name", *(["stack"] if many else []), "age", "a month", "note")
        output.table(*columns, rows=rows[:MOST_ROWS], right=(len(columns) - 3, len(columns) - 2))
        if len(rows) > MOST_ROWS:
            kinds = Counter(item.kind for item in found.items[MOST_ROWS:])
            output.line(f"and {len(rows) - MOST_ROWS:,} more: {', '.join(f'{count:,} {kind}' for kind, count in kinds.most_common())} (--json lists all)")
        output.line()
    for problem in found.problems:
        output.line(f"not asked: {problem}", style="yellow")
    if found.alive:
        output.line(f"{', '.join(found.alive)} is running: `python -m ops down` removes a stack that is up", style="yellow")
    kept = len(found.items) - len(found.left)
    if found.left:
        unpriced = f", besides {len(found.unpriced)} whose price is not known" if found.unpriced else ""
        cost = f"{usd(sum(item.usd_month or 0.0 for item in found.left))} a month{unpriced} (prices of {found.prices_as_of})"
        things = "1 thing" if len(found.left) == 1 else f"{len(found.left):,} things"
        output.line(f"{things} of {whose} {'is' if len(found.left) == 1 else 'are'} in account {found.account}, {where}: {cost}", style="bold")
        if found.stack and not found.alive and any(item.marked for item in found.left):
            output.line(f"`python -m ops leftovers {found.stack} --delete` removes what carries its tags")
    elif found.problems:
        output.line(f"nothing was found of {whose} in account {found.account}, {where}, but not everything could be asked", style="bold")
    else:
        output.line(f"nothing of {whose} is left in account {found.account}, {where}" + (", but what is kept on purpose" if kept else ""), style="bold green")


def _age(item: Leftover, now: datetime.datetime) -> str:
    return duration((now - item.created).total_seconds()) if item.created else "-"


def _month(item: Leftover) -> str:
    return "?" if item.usd_month is None else "-" if item.usd_month == 0 else usd(item.usd_month)


def _remark(item: Leftover) -> str:
    how = {"vpc": "no tag, in the stack's VPC", "name": "no tag, by its name"}.get(item.by, "")
    return "; ".join(part for part in (item.note, how, "kept on purpose" if item.kept else "") if part)
