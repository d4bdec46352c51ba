"""What a fault cost a run, from the run's own record beside that of the same run undisturbed. Reading needs neither torch nor Ray."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from training.errors import BadInput

WORKER, NOTICE, STORAGE, HEAD = "worker", "notice", "storage", "head"
FAULTS = (WORKER, NOTICE, STORAGE, HEAD)
MEANINGS = {
    WORKER: "worker killed",
    NOTICE: "spot notice",
    STORAGE: "store away",
    HEAD: "head killed",
}
# Two runs on another number of workers add up in another order; beyond this they are two runs.
SAME_CURVE = 1e-2


@dataclasses.dataclass(frozen=True)
class Toll:
    """What a fault cost. Times in seconds; None: not known.

    at_step: steps done when it struck. steps_lost: done, and done again. seconds_lost: by how much longer than the undisturbed run it took from its first
    logged step to its end. usd: what that costs where the run is. difference: largest relative difference of a step's loss from the undisturbed run's.
    judged_again: whether the last attempt's network was judged.
    """

    fault: str
    run: str
    outcome: str
    at_step: int
    attempts: int
    steps_lost: int
    seconds_lost: float | None
    usd: float | None
    difference: float | None
    judged_again: bool
    said: str = ""

    @property
    def survived(self) -> bool:
        """Whether the run ended as the undisturbed one: done, on the same curve, its network judged to the end."""
        return self.outcome == "done" and self.judged_again and self.difference is not None and self.difference <= SAME_CURVE


Record = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]
"""``run.json`` and the lines of ``metrics.jsonl``, as :func:`training.record.read_run` gives them."""


def toll(fault: str, at_step: int, struck: Record, verdict: Mapping[str, Any] | None, undisturbed: Record, usd_hour: float | None = None) -> Toll:
    """What ``fault`` cost the run ``struck``, beside ``undisturbed``, which has the same settings. usd_hour: list price of all nodes."""
    document, metrics = struck
    attempts = document["attempts"]
    lost = sum(max(0, (before["endStep"] or before["startStep"]) - after["startStep"]) for before, after in itertools.pairwise(attempts))
    mine, theirs = span(struck), span(undisturbed)
    seconds = None if mine is None or theirs is None else max(0.0, mine - theirs)
    return Toll(
        fault=fault,
        run=str(document["run"]),
        outcome=str(document["outcome"]),
        at_step=at_step,
        attempts=len(attempts),
        steps_lost=lost,
        seconds_lost=seconds,
        usd=None if seconds is None or usd_hour is None else seconds / 3600 * usd_hour,
        difference=difference(metrics, undisturbed[1]),
        judged_again=verdict is not None and verdict.get("attempt") == len(attempts) and verdict.get("outcome") != "fail",
        said=next((str(attempt["reason"]) for attempt in attempts if attempt["reason"]), ""),
    )


def span(record: Record) -> float | None:
    """Seconds from the first logged step to the run's end; None where it has none."""
    document, metrics = record
    first = next((line for line in metrics if "loss" in line), None)
    if first is None or document.get("ended") is None:
        return None
    began, ended = (datetime.datetime.fromisoformat(str(text)) for text in (first["time"], document["ended"]))
    return (ended - began).total_seconds()


def difference(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> float | None:
    """The largest relative difference between two runs' losses, over all steps; None unless both logged the same steps, with finite losses."""
    mine, theirs = ({int(line["step"]): float(line["loss"]) for line in metrics if "loss" in line} for metrics in (one, other))
    if not mine or mine.keys() != theirs.keys() or not all(map(math.isfinite, (*mine.values(), *theirs.values()))):
        return None
    return max(abs(mine[step] - theirs[step]) / max(abs(theirs[step]), 1e-9) for step in mine)


def as_json(tolls: Sequence[Toll]) -> list[dict[str, Any]]:
    """Plain data, keys as in run.json."""
    return [
        {
            "fault": found.fault,
            "run": found.run,
            "outcome": found.outcome,
            "survived": found.survived,
            "atStep": found.at_step,
            "attempts": found.attempts,
            "stepsLost": found.steps_lost,
            "secondsLost": found.seconds_lost,
            "usd": found.usd,
            "difference": found.difference,
            "judgedAgain": found.judged_again,
            "said": found.said,
        }
        for found in tolls
    ]


def rows(tolls: Sequence[Toll]) -> list[tuple[str, ...]]:
    """The table a person reads, its headings first."""
    money = any(found.usd is not None for found in tolls)
    heading = ("fault", "step", "redone", "seconds", *(["USD"] if money else []), "loss within", "network", "run")
    return [heading, *(_row(found, money) for found in tolls)]


def _row(found: Toll, money: bool) -> tuple[str, ...]:
    return (
        MEANINGS[found.fault],
        str(found.at_step),
        str(found.steps_lost),
        "?" if found.seconds_lost is None else f"{found.seconds_lost:.0f}",
        *(["?" if found.usd is None else f"{found.usd:.2f}"] if money else []),
        "other steps" if found.difference is None else f"{found.difference:.0e}" if found.difference else "0",
        "judged" if found.judged_again else "NOT judged",
        found.outcome,
    )


def as_text(tolls: Sequence[Toll]) -> list[str]:
    """The table as lines of a terminal, numbers to the right."""
    table = rows(tolls)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    numbers = range(1, table[0].index("network"))
    return [
        "  ".join(cell.rjust(width) if column in numbers else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in table
    ]


def strike_at(steps: int, checkpoint_every: int, seed: int, fault: str) -> int:
    """The step after which a fault strikes: by the seed, past the second checkpoint where there are as many steps, and in the run's first half."""
    last = max(1, steps // 2)
    return random.Random(f"{seed}/{fault}").randint(min(2 * checkpoint_every + 1, last), last)


def chosen(text: str) -> list[str]:
    """The faults of a comma-separated list. Raises BadInput for one that there is not."""
    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    unknown = [kind for kind in kinds if kind not in FAULTS]
    if unknown or not kinds:
        raise BadInput(f"--faults {text}: {', '.join(unknown) or 'nothing'} is no fault; there are {', '.join(FAULTS)}")
    return kinds
