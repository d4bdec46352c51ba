"""When a step takes too long, and who is said to be late. What hangs really is in tests/training."""

import dataclasses
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training import watchdog
from training.watchdog import DATA, OVER, STEP, Seen, hangs, limit, sentence, silent_ranks

HERE = Seen("h", 1, 41, STEP, True, 7, 100)


def ranks(*seen):
    return dict(enumerate(seen))


def test_a_hang_is_many_times_a_usual_step_but_never_less_than_the_floor():
    assert limit([], 10, 60) is None, "before any step nothing is known"
    assert limit([1.0, 2.0, 900.0], 10, 5) == 20, "one slow step changes nothing"
    assert limit([0.01], 10, 60) == 60


def test_the_silent_rank_is_the_late_one_even_when_it_was_ahead():
    late = dataclasses.replace(HERE, host="g", done=41)
    told = sentence(ranks(HERE, late, HERE), [1], 61.4, "runs/r/hang/attempt-1")
    assert told == (
        "rank 1 on host g is late: it has not answered since step 41 (stopped, or the host is lost), while the others wait in step 42;"
        " no step has ended for 61 s (stacks in runs/r/hang/attempt-1)"
    )


@pytest.mark.parametrize(
    ("late", "said"),
    [
        (dataclasses.replace(HERE, done=40, doing=DATA), "rank 1 on host h is late: it is waiting for data at step 41, while the others wait in step 42"),
        (dataclasses.replace(HERE, collectives=99), "rank 1 on host h is late: it is computing at step 42, while the others wait in step 42"),
    ],
)
def test_of_ranks_that_answer_the_one_that_has_done_less_is_late(late, said):
    assert sentence(ranks(HERE, late, HERE), [], 60, "there").startswith(said)


def test_where_none_is_behind_nobody_is_blamed():
    told = sentence(ranks(HERE, HERE), [], 60, "there")
    assert "all 2 ranks wait in step 42, and none is behind" in told
    assert "late" not in told
    alone = sentence(ranks(dataclasses.replace(HERE, doing=DATA)), [], 60, "there")
    assert alone.startswith("the run hangs: it is waiting for data at step 42")


def test_a_rank_that_has_left_is_told_apart_from_a_stopped_one():
    left = dataclasses.replace(HERE, doing=f"{OVER} (BadInput: a shard is damaged)")
    assert "it has left the training after step 41 (BadInput: a shard is damaged), while" in sentence(ranks(HERE, left), [1], 60, "there")


@given(st.dictionaries(st.integers(0, 7), st.tuples(st.integers(0, 3), st.booleans()), min_size=1))
def test_it_is_no_hang_while_a_rank_that_lives_has_reason_to_wait(after):
    before = {rank: dataclasses.replace(HERE, beat=1) for rank in after}
    now = {rank: dataclasses.replace(HERE, beat=1 + beats, overdue=overdue) for rank, (beats, overdue) in after.items()}
    assert silent_ranks(before, now) == [rank for rank, (beats, _) in after.items() if beats == 0]
    assert hangs(before, now) == (not any(beats and not overdue for beats, overdue in after.values()))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 500)), min_size=1, max_size=9), st.data())
def test_the_sentence_blames_no_rank_that_is_as_far_as_all(states, data):
    seen = ranks(*(dataclasses.replace(HERE, host=f"host-{i}", done=done, collectives=count) for i, (done, count) in enumerate(states)))
    silent = data.draw(st.lists(st.sampled_from(range(len(states))), unique=True, max_size=len(states) - 1))
    told = sentence(seen, silent, 60, "there")
    for rank in silent[:3]:
        assert f"rank {rank} on host host-{rank}" in told
    if not silent and len(set(states)) > 1:
        assert f"rank {states.index(min(states))} on host" in told
        assert f"rank {states.index(max(states))} on host" not in told


def test_without_py_spy_python_writes_the_stacks_itself(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    stacks = watchdog._stacks(os.getpid()).decode()
    assert "most recent call first" in stacks
    assert "test_without_py_spy" in stacks
