"""How results of the stack's commands look: tables and lines for a terminal of 80 columns or more. No function here asks anything."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from config import BadInput
from ops import phases, prove
from ops.compare import Comparison
from ops.inside import Job
from ops.output import Output, duration, harmless, usd
from ops.phases import Progress
from ops.prove import Proof
from ops.runs import Run
from ops.stack import Gone, Status, Update
from ops.why import Why
from training import faults

STYLES = {phases.FAILED: "bold red", phases.WORKING: "yellow", phases.DONE: "green", phases.SAME: "dim", phases.WAITING: "dim"}
WORDS = {phases.DONE: "made", phases.WORKING: "making", phases.SAME: "unchanged", phases.FAILED: "failed", phases.WAITING: "waiting"}
KINDS = {
    "up": WORDS,
    "destroy": {**WORDS, phases.DONE: "gone", phases.WORKING: "removing"},
    "refresh": {**WORDS, phases.DONE: "asked", phases.WORKING: "asking"},
}


def progress_table(progress: Progress, at: float, over: bool = False) -> RenderableType:
    """What is being made: part, state, how far, how long it takes and usually takes; while it is, what the program says beneath."""
    words = KINDS[progress.kind]
    made = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for column, right in (("", False), ("", False), ("", True), ("elapsed", True), ("usual", False), ("now", False)):
        made.add_column(column, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for row in progress.rows(at):
        working = row.state == phases.WORKING
        elapsed = duration(row.seconds) if row.state not in (phases.SAME, phases.WAITING) else ""
        usual = row.usual if row.state != phases.SAME else ""
        now = ", ".join(row.now) if working else ""
        made.add_row(row.title, Text(words[row.state], style=STYLES[row.state]), f"{row.done}/{row.known}", elapsed, usual, harmless(now))
    if over:
        return made
    total = Text(f"{words[phases.WORKING]} for {duration(at - progress.began)}", style="dim")
    notes = [Text(harmless(progress.detail), style="dim")] if progress.detail else []
    notes += [Text(progress.note, style="bold yellow")] if progress.note else []
    return Group(made, total, *notes)


# In a pipe a part is called done when nothing of it has changed for so long.
SETTLED_SECONDS = 20


class Watch:
    """Draws an operation's progress: a table over and over on a terminal, a line at each change in a pipe."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self._live: Live | None = None
        self._last: dict[str, str] = {}
        self._noted = ""

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if self.output.live:
            if self._live is None:
                self._live = Live(console=self.output.out, refresh_per_second=4, transient=True)
                self._live.start()
            self._live.update(progress_table(progress, now))
            return
        if self.output.as_json or progress.kind == "refresh":
            return
        self._lines(progress, now, over=False)

    def _lines(self, progress: Progress, now: float, over: bool) -> None:
        """A line where a part begins, fails, or has been done for a while: parts come back to life as what they waited for is there."""
        words = KINDS[progress.kind]
        for row in progress.rows(now):
            last = self._last.get(row.title)
            if row.state == phases.WORKING and last is None:
                self.output.line(f"{row.title}: {words[row.state]}" + (f" (usually {row.usual})" if row.usual else ""))
            elif (row.state == phases.FAILED and last != row.state) or (
                row.state == phases.DONE and last != row.state and (over or row.quiet > SETTLED_SECONDS)
            ):
                self.output.line(f"{row.title}: {words[row.state]} ({duration(row.seconds)})")
            else:
                continue
            self._last[row.title] = row.state
        if progress.note and progress.note != self._noted:
            self._noted = progress.note
            self.output.line(progress.note)

    def note(self, text: str) -> None:
        """A line above the table."""
        self.output.line(harmless(text), style="dim")

    def end(self, progress: Progress | None = None) -> None:
        """Leaves the last table standing."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            if progress is not None:
                self.output.out.print(progress_table(progress, time.monotonic(), over=True))
        elif progress is not None and progress.kind != "refresh" and not self.output.as_json:
            self._lines(progress, time.monotonic(), over=True)


def watched(output: Output, work: Callable[[Watch], Any]) -> Any:
    """Runs ``work`` with a drawn progress, whose last state stays on the screen whatever happens."""
    seen: list[Progress] = []

    class _Remembers(Watch):
        def __call__(self, progress: Progress) -> None:
            seen[:] = [progress]
            super().__call__(progress)

    watch = _Remembers(output)
    try:
        return work(watch)
    finally:
        watch.end(seen[0] if seen else None)


def update(output: Output, done: Update) -> None:
    """The end of an `up`."""
    output.line(f"{done.stack} is up: {phases.changes_text(done.changes)}, {duration(done.seconds)}", style="bold green")
    if done.usd_hour is not None:
        missing = f", without {', '.join(done.without_price_of)}" if done.without_price_of else ""
        output.line(f"costs {usd(done.usd_hour)} an hour (list prices of {done.prices_as_of}{missing}); stops: {done.stops_at}")
    if done.outputs.get("trainingJob"):
        output.line(f"training job {done.outputs['trainingJob']}: python -m ops logs {done.stack} -f")
    else:
        output.line(f"next: python -m ops train {done.stack}")


def gone(output: Output, done: Gone) -> None:
    """The end of a `down`."""
    for problem in done.problems:
        output.line(problem, style="bold yellow")
    if not done.changes and not done.forgotten:
        output.line(f"{done.stack}: nothing was up")
        return
    output.line(f"{done.stack} is down: {phases.changes_text(done.changes)}, {duration(done.seconds)}", style="bold green")
    if done.stopped_job:
        output.line(f"job {done.stopped_job} was stopped first")
    if done.forgotten:
        output.line(f"{len(done.forgotten)} Kubernetes objects were only taken out of the state: their cluster is gone")
    if done.kept_bucket:
        output.line(f"bucket {done.kept_bucket} stays, with its runs (storage.onDestroy: keep)")


def job(output: Output, found: Job, stack: str) -> None:
    """A job in a line or two."""
    where = f" ({found.submission_id})" if found.submission_id else ""
    style = {"SUCCEEDED": "bold green", "FAILED": "bold red"}.get(found.state, "bold")
    output.line(f"job {found.name}{where}: {found.state}", style=style)
    if found.over and found.state != "SUCCEEDED" and found.message:
        output.line(f"  {harmless(short(found.message))}")
    if not found.over:
        output.line(f"  python -m ops logs {stack} -f    python -m ops status {stack}    python -m ops cancel {stack}")


def short(message: str) -> str:
    """The telling line of a job's message, which ends with a piece of its log."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error: ")]
    return (told or lines or [""])[-1][:400] if told else (lines or [""])[0][:400]


def status(output: Output, found: Status, now: datetime.datetime | None = None) -> None:
    """`status` as rows of name and value."""
    at = now or datetime.datetime.now(datetime.UTC)
    rows: list[tuple[str, str, str]] = []
    style = {"up": "bold green", "partial": "bold yellow"}.get(found.state, "bold")
    rows.append(("stack", f"{found.stack}: {found.state}", style))
    if found.state == "partial" and found.last_operation:
        rows.append(("last operation", found.last_operation, ""))
    if found.up_since:
        rows.append(("up since", f"{found.up_since.astimezone():%Y-%m-%d %H:%M} ({duration((at - found.up_since).total_seconds())})", ""))
    if found.usd_hour is not None:
        so_far = f"{usd(found.usd_so_far)} so far, " if found.usd_so_far is not None else ""
        rows.append(("cost", f"{so_far}{usd(found.usd_hour)} an hour (list price, all nodes)", ""))
    if found.stops_at:
        left = (found.stops_at - at).total_seconds()
        rows.append(
            ("auto-stop", f"in {duration(left)}" if left > 0 else f"since {duration(-left)}: the GPU nodes are gone", "" if left > 0 else "bold yellow")
        )
    elif found.state != "down" and found.usd_hour is not None:
        rows.append(("auto-stop", "never (budget.stopAfter is not set)", "yellow"))
    if found.job:
        colour = {"SUCCEEDED": "bold green", "FAILED": "bold red", "RUNNING": "bold green"}.get(found.job.state, "bold")
        rows.append(("job", f"{found.job.name}: {found.job.state}", colour))
        if found.job.over and found.job.state != "SUCCEEDED" and found.job.message:
            rows.append(("", short(found.job.message), ""))
    elif found.state == "up" and not found.notes:
        rows.append(("job", f"none: python -m ops train {found.stack}", ""))
    if found.progress:
        rows += _progress_rows(found)
    made = Table(box=None, show_header=False, pad_edge=False, show_edge=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value, colour in rows:
        made.add_row(name, Text(harmless(value), style=colour))
    output.show(made)
    for note in found.notes:
        output.line(f"note: {harmless(note)}", style="yellow")


def _progress_rows(found: Status) -> list[tuple[str, str, str]]:
    at, rows = found.progress, []
    assert at is not None
    if at.run:
        rows.append(("run", at.run, ""))
    if at.step is not None and at.steps:
        over = found.job is not None and found.job.over
        rows.append(("step", f"{at.step}/{at.steps} ({at.step / at.steps:.0%})" + ("" if over else f", {at.left} left"), ""))
    if at.loss is not None:
        rows.append(("loss", f"{at.loss:.4f}", ""))
    if at.tokens_per_second is not None:
        rows.append(("speed", f"{at.tokens_per_second:,.0f} tokens/s" + (f", {at.mfu:.1%} MFU" if at.mfu is not None else ""), ""))
    if at.verdict:
        style = {"pass": "bold green", "fail": "bold red", "unproven": "bold yellow"}.get(at.verdict, "")
        rows.append(("network", f"{at.verdict}: expected {at.expected}, observed {at.observed}", style))
    if at.step is None and at.last_line and found.job is not None and not found.job.over:
        rows.append(("last line", at.last_line, ""))
    return rows


def explained(output: Output, found: Why) -> None:
    """The sentence, and the way out."""
    style = (
        "bold green"
        if found.running and found.cause in ("running", "done")
        else "bold yellow"
        if found.waiting
        else "bold red"
        if not found.running
        else "bold"
    )
    output.line(f"{harmless(found.sentence)}", style=style)
    if found.do:
        output.line(f"do: {harmless(found.do)}")


def verdict(output: Output, run: Run) -> bool:
    """The gate's verdict for a person; returns whether the run's network is proven, or none was demanded."""
    found = run.verdict
    if found is None:
        output.line(f"{run.name}: not judged; the gate speaks after the first step", style="bold yellow")
        return False
    ok = found.get("outcome") in ("pass", "not-required")
    ranks, hosts = found.get("ranks") or [], found.get("hosts") or []
    output.line(
        f"{run.name}: {found.get('outcome')}: expected {found.get('expected')}, observed {found.get('observed')}"
        f" ({len(ranks)} ranks on {len(hosts)} hosts, attempt {found.get('attempt')}, {found.get('judgedAt')})",
        style="bold green" if found.get("outcome") == "pass" else "bold" if ok else "bold red",
    )
    rows = [
        (
            str(rank.get("rank", "-")),
            str(rank.get("host", "-")),
            "+".join(rank.get("networks") or []) or str(rank.get("backend") or "-"),
            "+".join(rank.get("providers") or []) or "-",
            str(rank.get("nics") if rank.get("nics") is not None else "-"),
            " ".join(sorted({str(channel).split("/")[0] for channel in rank.get("channels") or []})) or "-",
        )
        for rank in ranks
    ]
    if rows:
        output.table("rank", "host", "network", "provider", "NICs", "channels", rows=rows)
    moved = [host for host in hosts if host.get("efaTx") is not None or host.get("nicTx") is not None]
    if moved:
        output.table(
            "host",
            "EFA sent",
            "received",
            "NIC sent",
            "received",
            rows=[(str(host.get("host")), *(_gb(host.get(key)) for key in ("efaTx", "efaRx", "nicTx", "nicRx"))) for host in moved],
            right=(1, 2, 3, 4),
        )
    for number, reason in enumerate(found.get("reasons") or [], 1):
        output.line(f"{number}. {reason.get('rule')}, {reason.get('where')}: {reason.get('saw')}")
        output.line(f"   do: {reason.get('do')}")
    for note in found.get("notes") or []:
        output.line(f"note: {note}", style="dim")
    return ok


def _gb(number: Any) -> str:
    return "-" if number is None else f"{number / 1e9:.2f} GB"


def compared(output: Output, found: Comparison) -> None:
    """What came out, then what differs."""
    output.table("what came out", *found.names, rows=[(row.what, *row.values) for row in found.results])
    output.line()
    if found.differences:
        output.table("what differs", *found.names, rows=[(row.what, *row.values) for row in found.differences])
    else:
        output.line("settings, versions, image, code and data are the same")


def proved(output: Output, found: Proof) -> None:
    """Legs, curves and the conclusion."""
    output.table(*prove.COLUMNS, rows=prove.rows(found), right=(0, 6))
    for curve in found.curves:
        output.line()
        rows = [(f"{row['bytes']:,.0f}", f"{row['seconds'] * 1e6:,.0f}", f"{row['algorithm']:.3g}", f"{row['bus']:.3g}") for row in curve.rows]
        output.table(
            "bytes", "time, us", "algorithm GB/s", "bus GB/s", rows=rows, title=f"all-reduce over {curve.transport} ({curve.tool})", right=(0, 1, 2, 3)
        )
    output.line()
    first, *rest = prove.summary(found)
    output.line(first, style="bold green" if found.holds else "bold red")
    for line in rest:
        output.line(line)


def drilled(output: Output, found: Sequence[faults.Toll]) -> None:
    """The table, and what did not go as it must."""
    heading, *rows = faults.rows(found)
    output.table(*heading, rows=rows, right=tuple(range(1, heading.index("network"))))
    for one in found:
        if not one.survived:
            output.line(
                f"{faults.MEANINGS[one.fault]}: run {one.run} did not end as the undisturbed one ({one.outcome}); {harmless(one.said)}", style="bold red"
            )


def write(file: Path, text: str) -> None:
    """Writes a page. Raises BadInput where that is not possible."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{file}: can't be written ({error}); name another place with --page") from error
