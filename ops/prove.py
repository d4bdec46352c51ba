"""Does the gate hold, and what is EFA worth here? The same short job over EFA and over TCP, in both orders, and one that must be refused.

Legs of a proof, by what the worker pods have:

with EFA: ``efa`` (demands EFA; the gate must pass it), ``tcp`` (sockets forced; the gate must pass it for tcp, and the same evidence must be refused
as a proof of EFA), ``fallback`` (demands EFA with NCCL's plugin taken away; must end with exit code 4).
without: ``tcp`` (must pass as tcp) and ``efa`` (demanded where there is none; must be refused). There is then no second speed to compare.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops import job_log
from ops.errors import EXIT_TRANSPORT_NOT_PROVEN, Refused
from ops.ray_jobs import RayJob

PASS, REFUSE = "pass", "refuse"
CURVE = Path(__file__).with_name("in_pods") / "all_reduce.py"
# NCCL without the plugin: what a broken image does, and the environment that a job gives its ranks does not undo.
WITHOUT_PLUGIN = {"NCCL_NET_PLUGIN": "none"}
# A proof trains to measure, not to keep: no checkpoint but the last, no model, no evaluation.
SHORT = {"export": False, "evalRows": 0, "evalEvery": 0, "keepCheckpoints": 1, "checkpointEvery": 1_000_000, "maxFailures": 0, "stopAfter": None}


@dataclasses.dataclass(frozen=True)
class Leg:
    """One job of a proof. must: pass or refuse. timed: its speed counts. environment: on top of the job's own."""

    name: str
    transport: str
    must: str
    timed: bool
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


EFA = Leg("efa", "efa", PASS, timed=True)
TCP = Leg("tcp", "tcp", PASS, timed=True)
FALLBACK = Leg("fallback", "efa", REFUSE, timed=False, environment=WITHOUT_PLUGIN)
NO_DEVICE = Leg("efa", "efa", REFUSE, timed=False)


@dataclasses.dataclass(frozen=True)
class Result:
    """How a leg went. held: it passed, or was refused, as it must. tokens_per_second: median of the steps after the first two logged."""

    leg: str
    round: int
    submission_id: str
    must: str
    held: bool
    observed: str | None
    outcome: str | None
    exit_code: int | None
    tokens_per_second: float | None
    said: str = ""


@dataclasses.dataclass(frozen=True)
class Curve:
    """An all-reduce bandwidth curve. rows: {bytes, seconds, algorithm, bus}, bandwidths in GB/s. note: why it is not all_reduce_perf's."""

    transport: str
    tool: str
    ranks: int
    hosts: int
    rows: tuple[Mapping[str, float], ...]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Proof:
    """holds: every leg went as it must. ratio: EFA's speed over TCP's, median over rounds; ratio_spread: smallest and largest. note: what is not shown."""

    stack: str
    holds: bool
    results: tuple[Result, ...]
    ratio: float | None
    ratio_spread: tuple[float, float] | None
    curves: tuple[Curve, ...]
    note: str = ""


def legs(efa: bool, rounds: int) -> list[tuple[int, Leg]]:
    """(round, leg) in the order in which they run: each round turns the order around, for the second profits from warm caches."""
    pair = [EFA, TCP] if efa else [TCP, NO_DEVICE]
    plan: list[tuple[int, Leg]] = []
    for number in range(1, rounds + 1):
        plan += [(number, leg) for leg in (pair if number % 2 else reversed(pair))]
    return [*plan, (rounds, FALLBACK)] if efa else plan


def settings_of(leg: Leg, settings: Mapping[str, Any], steps: int, run: str) -> dict[str, Any]:
    """The job's settings for a leg: the stack's own, but short, and under a name of its own, so that no run is gone on with."""
    found = {**settings, **{key: value for key, value in SHORT.items() if value is not None}}
    found.pop("stopAfter", None)
    found.pop("minWorkers", None)  # on one host there is nothing to prove
    found |= {
        "steps": steps,
        "warmupSteps": min(int(found.get("warmupSteps", 20)), steps),
        "run": run,
        "transport": leg.transport,
        "logEvery": max(1, steps // 20),
    }
    if leg.transport != "efa":
        found.pop("nicsPerHost", None)
        found.pop("gpuDirect", None)
    return found


def judged(leg: Leg, number: int, job: RayJob, log: str) -> Result:
    """Whether the leg went as it must: a passing leg ends well with the verdict pass; a refused one ends with exit code 4, and nothing else counts."""
    progress = job_log.read(log)
    if leg.must == PASS:
        held = job.state == "SUCCEEDED" and progress.verdict == "pass" and progress.observed == leg.transport
    else:
        held = job.state == "FAILED" and job.exit_code == EXIT_TRANSPORT_NOT_PROVEN
    speeds = [speed for _, speed in job_log.speeds(log)]
    steady = speeds[2:] or speeds[1:] or speeds
    errors = job_log.errors(log)
    return Result(
        leg=leg.name,
        round=number,
        submission_id=job.submission_id,
        must=leg.must,
        held=held,
        observed=progress.observed,
        outcome=progress.verdict,
        exit_code=job.exit_code,
        tokens_per_second=statistics.median(steady) if steady and leg.timed else None,
        said=errors[-1] if errors else progress.last_line,
    )


def ratios(results: Sequence[Result]) -> list[float]:
    """EFA's tokens a second over TCP's, of each round that has both."""
    found = []
    for number in sorted({result.round for result in results}):
        mine = {result.leg: result.tokens_per_second for result in results if result.round == number and result.tokens_per_second}
        if mine.get("efa") and mine.get("tcp"):
            found.append(float(mine["efa"]) / float(mine["tcp"]))
    return found


def proof(stack: str, results: Sequence[Result], curves: Sequence[Curve], efa: bool) -> Proof:
    """The whole, from its legs."""
    found = ratios(results)
    note = "" if efa else "these workers have no EFA: the gate is shown to pass tcp and to refuse efa; there is no second speed to compare"
    return Proof(
        stack=stack,
        holds=bool(results) and all(result.held for result in results),
        results=tuple(results),
        ratio=statistics.median(found) if found else None,
        ratio_spread=(min(found), max(found)) if found else None,
        curves=tuple(curves),
        note=note,
    )


def curve_of(log: str, transport: str) -> Curve:
    """The curve that all_reduce.py printed. Raises Refused where it did not."""
    match = re.search(r"^RESULT (\{.*\})$", log, re.MULTILINE)
    if not match:
        lines = [line for line in log.splitlines() if line.strip()]
        raise Refused(f"the all-reduce curve over {transport} was not measured: {lines[-1][:300] if lines else 'it said nothing'}")
    told = json.loads(match[1])
    return Curve(transport, str(told["tool"]), int(told["ranks"]), int(told["hosts"]), tuple(told["rows"]), str(told.get("note") or ""))


def picture(found: Proof) -> str:
    """Bus bandwidth over message size, and the speeds of the legs, as SVG."""
    from ops.compare import COLORS, svg

    color = {"efa": COLORS[0], "tcp": COLORS[1]}
    timed = [result for result in found.results if result.tokens_per_second]

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for curve in found.curves:
            left.plot(
                [row["bytes"] for row in curve.rows],
                [row["bus"] for row in curve.rows],
                marker="o",
                markersize=3,
                color=color.get(curve.transport, COLORS[2]),
                label=f"{curve.transport}: {curve.tool}",
            )
        left.set_xscale("log", base=2)
        left.set_xlabel("bytes of the message")
        left.set_ylabel("bus bandwidth, GB/s")
        if found.curves:
            left.legend(loc="upper left")
        for index, result in enumerate(timed):
            right.bar(index, result.tokens_per_second, color=color.get(result.leg, COLORS[2]))
        right.set_xticks(range(len(timed)), [f"{result.leg} {result.round}" for result in timed])
        right.set_ylabel("tokens/s")
        right.set_ylim(0, max((result.tokens_per_second or 0.0 for result in timed), default=1.0) * 1.15)

    return svg(draw, "proof", (9.0, 3.4))


def as_page(found: Proof) -> str:
    """The proof on one page."""
    from ops.compare import page, rows_html

    return page(
        f"Proof of {found.stack}: " + ("the gate holds" if found.holds else "the gate does not hold"),
        [picture(found), rows_html("Legs", COLUMNS, rows(found)), *(f"<p>{line}</p>" for line in _escaped(summary(found)))],
    )


def _escaped(lines: Sequence[str]) -> list[str]:
    import html

    return [html.escape(line) for line in lines]


COLUMNS = ("round", "leg", "must", "held", "network", "exit", "tokens/s")


def rows(found: Proof) -> list[tuple[str, ...]]:
    """A row a leg."""
    return [
        (
            str(result.round),
            result.leg,
            result.must,
            "yes" if result.held else "NO",
            f"{result.observed or '-'} ({result.outcome or 'not judged'})",
            "-" if result.exit_code is None else str(result.exit_code),
            "-" if result.tokens_per_second is None else f"{result.tokens_per_second:,.0f}",
        )
        for result in found.results
    ]


def summary(found: Proof) -> list[str]:
    """The proof in a few sentences."""
    lines = ["the gate holds: every leg went as it must" if found.holds else "the gate does NOT hold: " + "; ".join(_broken(found))]
    if found.ratio is not None and found.ratio_spread is not None:
        low, high = found.ratio_spread
        lines.append(f"EFA trains {found.ratio:.2f} times as fast as TCP here (rounds: {low:.2f} to {high:.2f})")
    for curve in found.curves:
        best = max(curve.rows, key=lambda row: row["bus"], default=None)
        if best is not None and not math.isnan(best["bus"]):
            size = f"{best['bytes'] / 2**20:,.0f} MiB" if best["bytes"] >= 2**20 else f"{best['bytes'] / 2**10:,.0f} KiB"
            lines.append(
                f"all-reduce over {curve.transport}: up to {best['bus']:.3g} GB/s bus bandwidth at {size}"
                f" ({curve.tool}, {curve.ranks} ranks on {curve.hosts} hosts)"
            )
        if curve.note:
            lines.append(curve.note)
    if found.note:
        lines.append(found.note)
    return lines


def _broken(found: Proof) -> list[str]:
    return [
        f"round {result.round}, {result.leg}: must {result.must}, ended with {result.exit_code} ({result.said[:200]})"
        for result in found.results
        if not result.held
    ]
