"""The trial of a micro-batch, on real ranks; that memory runs out can only be seen on a GPU."""

import torch

from tests.training import tiny
from tests.training.ranks import run_ranks
from training import loop, room
from training.storage import place


def _try(world, folder):
    case = tiny.Case()
    _, net, optimizer = tiny.build(world, case)
    before = [p.full_tensor().clone() for p in net.parameters()]
    room.check(net, optimizer, case.settings, world, place(folder), size=2, length=tiny.LENGTH, rows=tiny.ROWS, reshard=False)
    same = all(torch.equal(p.full_tensor(), b) for p, b in zip(net.parameters(), before, strict=True))
    return same, all(p.grad is None for p in net.parameters()), room.too_large(place(folder))


def test_the_trial_leaves_weights_and_gradients_as_they_were(tmp_path):
    for same, clean, noted in run_ranks(2, _try, str(tmp_path)):
        assert same
        assert clean
        assert noted is None


def _moments(world):
    case = tiny.Case()
    _, net, optimizer = tiny.build(world, case)
    fresh = len(room.missing_moments(net, optimizer))
    loop.forward_backward(net, tiny.batch_of(0, world.size, world.rank, case.micro_batch, case.uneven), case.settings, world, case.reshard)
    optimizer.step()
    return fresh, len(list(net.parameters())), len(room.missing_moments(net, optimizer))


def test_the_moments_of_a_resumed_run_are_not_counted_twice():
    fresh, parameters, resumed = run_ranks(1, _moments)[0]
    assert fresh == 2 * parameters
    assert resumed == 0
