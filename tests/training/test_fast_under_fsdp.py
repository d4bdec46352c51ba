"""The fast blocks under FSDP2 on real ranks, with Triton's interpreter where there is no GPU (so: few tokens)."""

import pytest
import torch

from tests.training import tiny
from tests.training.ranks import run_ranks
from training import loop
from training.data import MicroBatch, Step

TOKENS = 6


def _compare(world, reshard, recompute):
    found = []
    for blocks in ("plain", "fast"):
        case = tiny.Case(blocks=blocks, reshard=reshard, recompute=recompute)
        _, net, _ = tiny.build(world, case)
        tokens = torch.randint(0, tiny.VOCABULARY, (2, 1, TOKENS + 1), generator=torch.Generator().manual_seed(world.rank))
        micros = [MicroBatch(t[:, :-1].contiguous(), t[:, 1:].contiguous(), None) for t in tokens]
        loss = loop.forward_backward(net, Step(0, micros, 2 * TOKENS, 0.0), case.settings, world, reshard)
        found.append((loss.item(), {name: p.grad.full_tensor() for name, p in net.named_parameters()}))
    (loss, expected), (fast_loss, fast) = found
    return loss, fast_loss, {name: ((fast[name] - g).norm() / g.norm()).item() for name, g in expected.items()}


@pytest.mark.parametrize(("reshard", "recompute"), [(True, "none"), (False, "selective"), (True, "full")])
def test_sharded_fast_blocks_have_the_gradients_of_transformers_own(reshard, recompute):
    """With resharding a block's weights are freed after the forward pass and gathered again for the backward pass."""
    pytest.importorskip("triton", reason="the fast blocks need Triton, which PyTorch brings along on Linux")
    for loss, fast_loss, errors in run_ranks(2, _compare, reshard, recompute):
        assert fast_loss == pytest.approx(loss, rel=1e-5)
        assert len(errors) > 20
        for name, error in errors.items():
            assert error < 1e-5, f"{name}: relative error {error:.2e}"
