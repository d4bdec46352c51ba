"""The commands that ask an AWS account: doctor, plan, cost, leftovers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from ops import doctor as doctors
from ops import errors
from ops.cli import JsonOption, StackArgument
from ops.errors import Attention
from ops.output import Output, duration, usd

MARKS = {"fail": "FAIL", "warn": "warn", "unknown": "?", "note": "note", "ok": "ok"}
STYLES = {"fail": "bold red", "warn": "yellow", "unknown": "yellow", "note": "cyan", "ok": "green"}


def register(app: typer.Typer) -> None:
    """Adds the commands to the app."""
    app.command(epilog=errors.help_text(errors.EXIT_LEFT))(doctor)


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
    output.result(report)
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
        rows.append((MARKS[finding.level], finding.check, text))
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
