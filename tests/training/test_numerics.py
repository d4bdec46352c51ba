"""The sharded, accumulated, chunked training computes what plain PyTorch computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests.training.ranks import run_ranks
from tests.training.tiny import Case, batch_of, build, reference, train
from training import loop
from training.world import World

TOLERANCE = 1e-4


def assert_same(ours: list[tuple[int, float, float]], plain: list[tuple[int, float, float]], tolerance: float = TOLERANCE) -> None:
    assert [line[0] for line in ours] == [line[0] for line in plain], "the same steps must have been done"
    for (step, loss, norm), (_, plain_loss, plain_norm) in zip(ours, plain, strict=True):
        assert loss == pytest.approx(plain_loss, rel=tolerance), f"loss differs at step {step}"
        assert norm == pytest.approx(plain_norm, rel=tolerance), f"gradient norm differs at step {step}"


@pytest.mark.parametrize(
    ("case", "size", "local_size"),
    [
        (Case(), 1, 1),
        (Case(), 2, 2),
        (Case(reshard=False), 2, 2),
        (Case(tied=False, model_type="llama"), 2, 2),
        (Case(model_type="qwen3", recompute="full"), 2, 2),
        (Case(recompute="selective", uneven=True), 2, 2),
        (Case(parallel="hsdp", micro_batch=1), 4, 2),
        (Case(parallel="hsdp", reshard=False, uneven=True), 4, 2),
        (Case(uneven=True, micro_batch=3), 3, 3),
        (Case(together=2, reshard=False, recompute="full", uneven=True), 2, 2),
        (Case(together=3, reshard=False, parallel="hsdp", micro_batch=1), 4, 2),
    ],
    ids=lambda value: f"{value.model_type}-{value.parallel}-{value.recompute}-{value.together}" if isinstance(value, Case) else str(value),
)
def test_loss_and_gradient_norm_equal_the_unsharded_run(case: Case, size: int, local_size: int) -> None:
    results = run_ranks(size, train, case, local_size=local_size)
    assert all(result == results[0] for result in results), "every rank must report the same numbers"
    assert_same(results[0], reference(case))


def gathers(world: World, together: int) -> int:
    """All-gathers of a forward and backward pass."""
    case = Case(reshard=False, together=together)
    _, net, _ = build(world, case)
    with CommDebugMode() as seen:
        loop.forward_backward(net, batch_of(0, world.size, world.rank, 6, uneven=False), case.settings, world, reshard=False)
    return int(seen.get_comm_counts()[torch.ops.c10d._allgather_base_])


def test_blocks_of_one_unit_are_gathered_at_once() -> None:
    apart, joined = (run_ranks(2, gathers, together)[0] for together in (1, 2))
    assert (apart, joined) == (3, 2), "the root, and two blocks one by one or together"


def evaluated_before_and_after_a_change(world: World) -> tuple[float, float, float]:
    """Held-out losses of a model, of it with tripled weights, and of these without an evaluation before."""
    case = Case(reshard=False)
    batch = batch_of(5, world.size, world.rank, 6, uneven=False).micro_batches
    found = []
    for first in (True, False):
        _, net, _ = build(world, case)
        shards = list(net.parameters())
        if first:
            found.append(loop.evaluate(net, batch, case.settings, world))
        with torch.no_grad():
            for shard in shards:
                shard.mul_(3.0)
        found.append(loop.evaluate(net, batch, case.settings, world))
    return found[0], found[1], found[2]


def test_an_evaluation_sees_the_weights_of_its_time_and_none_that_an_earlier_one_gathered() -> None:
    before, after, fresh = run_ranks(2, evaluated_before_and_after_a_change)[0]
    assert after == fresh, "the change must be seen"
    assert before != fresh


def test_accumulation_gives_the_step_of_one_big_batch() -> None:
    small, big = (run_ranks(1, train, Case(micro_batch=size, uneven=True))[0] for size in (1, 12))
    assert_same(small, big, 1e-5)


def test_a_rank_without_any_valid_token_changes_nothing() -> None:
    # 12 rows on 5 ranks in micro-batches of 3: ranks 2, 3 and 4 get rows that only fill the shape.
    case = Case(micro_batch=3, uneven=True, steps=2)
    assert_same(run_ranks(5, train, case)[0], reference(case))


def test_bf16_compute_and_reduce_stay_near_float32() -> None:
    case = Case(compute_dtype="bf16", reduce_dtype="bf16", steps=3)
    ours = run_ranks(2, train, case)[0]
    assert_same(ours, reference(dataclasses.replace(case, compute_dtype="fp32")), 3e-2)
