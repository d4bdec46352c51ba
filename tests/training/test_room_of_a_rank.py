"""The trial of a micro-batch, on real ranks; that memory runs out can only be seen on a GPU."""

import torch

from tests.training import tiny
from tests.training.ranks import run_ranks
from training import room
from training.storage import place


def _try(world, folder):
    case = tiny.Case()
    _, net, _ = tiny.build(world, case)
    before = [p.full_tensor().clone() for p in net.parameters()]
    room.check(net, case.settings, world, place(folder), size=2, length=tiny.LENGTH, rows=tiny.ROWS, reshard=False)
    same = all(torch.equal(p.full_tensor(), b) for p, b in zip(net.parameters(), before, strict=True))
    return same, all(p.grad is None for p in net.parameters()), room.too_large(place(folder))


def test_the_trial_leaves_weights_and_gradients_as_they_were(tmp_path):
    for same, clean, noted in run_ranks(2, _try, str(tmp_path)):
        assert same
        assert clean
        assert noted is None
