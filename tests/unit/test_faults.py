"""What a fault cost, computed from two runs' records."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training import faults
from training.errors import BadInput

BEGAN = datetime.datetime(2026, 11, 1, 12, tzinfo=datetime.UTC)


def lines(steps: int, seconds: float = 1.0, gap_after: int = 0, gap: float = 0.0, change: float = 0.0) -> list[dict[str, Any]]:
    """A line a step, ``seconds`` apart, and ``gap`` more after a step; losses times 1 + ``change``."""
    return [
        {
            "step": step,
            "loss": (5 - step / 100) * (1 + change),
            "time": (BEGAN + datetime.timedelta(seconds=step * seconds + gap * (step > gap_after))).isoformat(),
        }
        for step in range(1, steps + 1)
    ]


def record(*attempts: tuple[int, int, str], seconds: float = 100.0) -> dict[str, Any]:
    """run.json with attempts (start step, end step, outcome), of a run that ended ``seconds`` after it began."""
    made = [
        {"number": i, "startStep": a, "endStep": b, "outcome": how, "reason": None if how == "done" else "why"} for i, (a, b, how) in enumerate(attempts, 1)
    ]
    return {"run": "r", "outcome": attempts[-1][2], "attempts": made, "ended": (BEGAN + datetime.timedelta(seconds=seconds)).isoformat()}


CALM = (record((0, 100, "done")), lines(100))
JUDGED = {"attempt": 2, "outcome": "not-required"}


def test_a_restart_costs_the_steps_since_the_checkpoint_and_the_time_until_they_are_made_up_for() -> None:
    struck = (record((0, 57, "lost"), (50, 100, "done"), seconds=130), lines(100, gap_after=50, gap=30))
    found = faults.toll(faults.WORKER, 57, struck, JUDGED, CALM, usd_hour=12.0)
    assert (found.steps_lost, found.seconds_lost, found.usd) == (7, 30.0, pytest.approx(0.1))
    assert found.difference == 0
    assert found.survived
    assert found.said == "why"


def test_without_a_price_there_is_no_money_in_the_table_and_with_one_there_is() -> None:
    free, paid = (faults.toll(faults.HEAD, 5, CALM, {"attempt": 1, "outcome": "pass"}, CALM, usd_hour=price) for price in (None, 3.0))
    assert "USD" not in faults.rows([free])[0]
    assert "USD" in faults.rows([paid])[0]
    assert free.survived


@pytest.mark.parametrize(
    ("struck", "verdict"),
    [
        ((record((0, 57, "lost"), (50, 80, "failed")), lines(80)), JUDGED),
        ((record((0, 57, "lost"), (50, 100, "done")), lines(100, change=0.02)), JUDGED),
        ((record((0, 57, "lost"), (50, 100, "done")), lines(100)), {"attempt": 1, "outcome": "pass"}),
        ((record((0, 57, "lost"), (50, 100, "done")), lines(100)), {"attempt": 2, "outcome": "fail"}),
        ((record((0, 57, "lost"), (50, 100, "done")), lines(100)), None),
        ((record((0, 57, "lost"), (50, 100, "done")), [*lines(99), {"step": 100, "loss": float("nan"), "time": BEGAN.isoformat()}]), JUDGED),
    ],
    ids=["it failed", "another curve", "judged before the restart only", "on the wrong network", "never judged", "not a number"],
)
def test_a_run_that_did_not_end_as_the_undisturbed_one_has_not_survived(struck: faults.Record, verdict: dict[str, Any] | None) -> None:
    assert not faults.toll(faults.WORKER, 57, struck, verdict, CALM).survived


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 9)), min_size=1, max_size=6), st.floats(0, 1000))
def test_what_is_lost_is_never_negative_and_is_the_sum_over_the_restarts(ends: list[tuple[int, int]], gap: float) -> None:
    attempts, start = [], 0
    for step, back in ends:
        end = max(start, step)
        attempts.append((start, end, "lost"))
        start = max(0, end - back)
    struck = (record(*attempts, (start, 100, "done"), seconds=100 + gap), lines(100, gap_after=50, gap=gap))
    found = faults.toll(faults.NOTICE, 1, struck, None, CALM)
    assert found.steps_lost == sum(end - after for (_, end, _), (after, _, _) in zip(attempts, [*attempts[1:], (start, 0, "")], strict=True))
    assert found.seconds_lost is not None
    assert found.seconds_lost == pytest.approx(gap, abs=1e-3)


@given(st.integers(1, 10_000), st.integers(1, 2_000), st.integers(), st.sampled_from(faults.FAULTS))
def test_a_fault_strikes_within_the_run_and_past_its_second_checkpoint_where_there_is_one(steps: int, every: int, seed: int, fault: str) -> None:
    at = faults.strike_at(steps, every, seed, fault)
    assert 1 <= at <= max(1, steps // 2)
    assert at > 2 * every or 2 * every + 1 > steps // 2
    assert at == faults.strike_at(steps, every, seed, fault), "the seed decides"


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    tolls = [faults.toll(kind, 1234, CALM, {"attempt": 1}, (CALM[0], lines(100, change=1e-4)), usd_hour=99.0) for kind in faults.FAULTS]
    text = faults.as_text(tolls)
    assert len(text) == 5
    assert max(map(len, text)) <= 80, text


def test_an_unknown_fault_is_named_with_those_that_there_are() -> None:
    assert faults.chosen("head, worker") == ["head", "worker"]
    for given_, named in (("fire", "fire"), ("", "nothing")):
        with pytest.raises(BadInput, match=f"{named} is no fault; there are worker, notice, storage, head"):
            faults.chosen(given_)
