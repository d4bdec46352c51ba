"""Clipping inside the optimizer's kernel against PyTorch's own clipping before it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.optimizer import divisor, make_optimizer
from training.settings import ModelSettings, Settings

SETTINGS = Settings(data="unused", model=ModelSettings(random="tiny"), learning_rate=1e-2, weight_decay=0.1)


def network(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 3))


def fill_gradients(net: torch.nn.Module, size: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = size * torch.randn(p.shape, generator=generator)


@settings(deadline=None, max_examples=50)
@given(size=st.floats(1e-6, 1e6), limit=st.sampled_from([0.0, 1e-3, 1.0, 50.0]), seed=st.integers(0, 100))
def test_steps_are_those_of_clipped_gradients(size: float, limit: float, seed: int) -> None:
    ours, theirs = network(seed), network(seed)
    optimizer = make_optimizer(ours, SETTINGS)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=1e-2, betas=(SETTINGS.beta1, SETTINGS.beta2))
    for step in range(3):
        fill_gradients(ours, size, seed + step)
        fill_gradients(theirs, size, seed + step)
        norm = optimizer.gradient_norm()
        optimizer.update(divisor(norm, limit))
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit if limit else float("inf"))
        plain.step()
        assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_divisor_is_used_for_one_step() -> None:
    net = network(0)
    optimizer = make_optimizer(net, SETTINGS)
    fill_gradients(net, 1.0, 0)
    optimizer.update(torch.tensor(4.0))
    first = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    fill_gradients(net, 1.0, 0)
    optimizer.update(None)
    second = optimizer.state_dict()["state"][0]["exp_avg"]
    whole = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    beta = SETTINGS.beta1
    torch.testing.assert_close(first, (1 - beta) * whole / 4)
    torch.testing.assert_close(second, beta * first + (1 - beta) * whole, msg="the second step's gradients are not divided")


def test_a_norm_that_is_not_finite_stays_one() -> None:
    net = network(0)
    optimizer = make_optimizer(net, SETTINGS)
    fill_gradients(net, 1.0, 0)
    next(net.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
    norm = optimizer.gradient_norm()
    assert norm.isnan(), "or the loop would not see it"
    scale = divisor(norm, 1.0)
    assert scale is not None
    assert scale.isnan()
