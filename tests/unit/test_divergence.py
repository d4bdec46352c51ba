"""What counts as a spike, and which rows a run trains on when some were skipped."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.test_data_loading import LENGTH, numbered, rows_taken, write
from training.data import Batches, rows_of_step
from training.divergence import FEWEST_LINES, FILE, Spikes, bad_range, data_step, merged, not_finite, ranges, read_skips, write_skips
from training.errors import BadInput
from training.storage import place

RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1])), max_size=6)


@given(RANGES)
def test_the_steps_are_the_data_steps_in_order_without_the_skipped_ones(skipped):
    left_out = {step for first, end in skipped for step in range(first, end)}
    wanted = [step for step in range(200) if step not in left_out][:60]
    assert [data_step(step, skipped) for step in range(60)] == wanted, "no data step twice, none lost but the skipped"


@given(RANGES, st.integers(0, 30), st.integers(1, 20))
def test_a_rollback_changes_nothing_before_its_checkpoint_and_skips_all_that_was_trained_on_since(skipped, good, steps):
    bad = good + steps
    used = [data_step(step, skipped) for step in range(good, bad)]
    after = merged([*skipped, bad_range(good, bad, skipped)])
    assert [data_step(step, after) for step in range(good)] == [data_step(step, skipped) for step in range(good)], "steps in the checkpoint keep their rows"
    assert data_step(good, after) > max(used), "what is done again must have other rows"
    assert not {data_step(step, after) for step in range(100)} & set(used)


@given(RANGES)
def test_ranges_are_merged_without_a_change(skipped):
    found = merged(skipped)
    assert {step for first, end in found for step in range(first, end)} == {step for first, end in skipped for step in range(first, end)}
    assert all(one[1] < other[0] for one, other in pairwise(found)), "in order, disjoint and not touching"


@given(skipped=RANGES, worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_every_number_of_workers_reads_the_same_rows_around_what_is_skipped(tmp_path_factory, skipped, worlds):
    prepared = write(tmp_path_factory.mktemp("rows"), {"train": numbered(7)}, LENGTH)
    for step in (0, 3):
        read = []
        for world in worlds:
            parts = []
            for rank in range(world):
                with Batches(prepared, "train", 6, 2, world, rank, 1, step, False, skipped=skipped) as batches:
                    parts.append(next(batches))
            assert all(part.index == step for part in parts), "the step keeps its number, and its learning rate"
            read.append(sorted(row for part in parts for row in rows_taken(part)))
        assert read[0] == read[1] == sorted(rows_of_step(7, data_step(step, skipped), 6, 1).tolist())


LOSSES = st.lists(st.floats(0.5, 12), min_size=FEWEST_LINES, max_size=60)


@given(LOSSES, st.floats(1, 20))
def test_a_loss_no_higher_than_before_is_never_a_spike(losses, factor):
    spikes = Spikes(factor)
    for loss in losses:
        spikes.judge(loss)
    assert spikes.judge(min(spikes.recent)) is None


@given(LOSSES)
def test_a_loss_far_beyond_all_that_was_is_a_spike_and_does_not_become_usual(losses):
    spikes = Spikes(8)
    for loss in losses:
        spikes.recent.append(loss)
    high = 8 * 20 * max(losses)
    for _ in range(100):
        found = spikes.judge(high)
        assert found is not None
        assert "spike" in found


def test_spikes_are_off_unless_asked_for_and_not_judged_by_a_few_lines():
    off, early = Spikes(0), Spikes(8)
    for _ in range(FEWEST_LINES - 1):
        assert off.judge(1.0) is None
        assert early.judge(1.0) is None
    assert off.judge(1e9) is None
    assert early.judge(1e9) is None, "too few lines to know what is usual"


def test_a_steady_loss_may_move_a_little():
    spikes = Spikes(8)
    for _ in range(20):
        spikes.judge(2.0)
    assert spikes.judge(2.1) is None, "a deviation of zero would make everything a spike"
    assert spikes.judge(2.2) is not None


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (-math.inf, 1.0)])
def test_what_is_not_finite_is_told_with_its_numbers(loss, norm):
    assert not_finite(1.0, 2.0) is None
    found = not_finite(loss, norm)
    assert found is not None
    assert str(loss) in found
    assert str(norm) in found


def test_skips_are_read_back_and_a_damaged_file_is_refused(tmp_path):
    run = place(str(tmp_path))
    assert read_skips(run) == []
    write_skips(run, [{"from": 3, "to": 7, "reason": "a spike"}, {"from": 7, "to": 9, "reason": "another"}])
    assert ranges(read_skips(run)) == [(3, 9)]
    for damage in ("{", "[]", '{"schema": 2, "skipped": []}', '{"schema": 1, "skipped": [{"from": "3", "to": 7}]}'):
        (tmp_path / FILE).write_text(damage)
        with pytest.raises(BadInput, match=r"skips\.json: damaged"):
            read_skips(run)
