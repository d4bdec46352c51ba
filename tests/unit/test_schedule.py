from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.schedule import learning_rate
from training.settings import ModelSettings, Settings


def make(**changes: object) -> Settings:
    return Settings(data="d", model=ModelSettings(random="tiny"), **changes)  # type: ignore[arg-type]


def test_it_warms_up_to_the_peak_and_ends_at_its_floor() -> None:
    s = make(steps=100, warmup_steps=10, learning_rate=1.0, final_learning_rate=0.1)
    assert learning_rate(0, s) == pytest.approx(0.1)
    assert learning_rate(9, s) == pytest.approx(1.0)
    assert learning_rate(10, s) == pytest.approx(1.0)
    assert learning_rate(99, s) == pytest.approx(0.1), "the last step has the floor"


@given(st.integers(1, 500), st.integers(0, 500), st.floats(0, 1))
def test_it_never_leaves_its_bounds_and_never_rises_after_warm_up(steps: int, warmup: int, floor: float) -> None:
    s = make(steps=steps, warmup_steps=min(warmup, steps), learning_rate=2.0, final_learning_rate=floor)
    rates = [learning_rate(step, s) for step in range(steps)]
    assert all(0 < rate <= 2.0 or (rate == 0 and floor == 0) for rate in rates)
    after = rates[s.warmup_steps :]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after))
