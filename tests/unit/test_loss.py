"""The chunked loss is the full one, in value and gradient, and float32 whatever comes in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.loss import IGNORE, chunked_linear_cross_entropy


def _full(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels, ignore_index=IGNORE, reduction="sum")


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**20), st.floats(0, 1))
def test_value_and_gradients_equal_the_full_loss(tokens: int, chunk: int, seed: int, ignored: float) -> None:
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(tokens, 8, generator=g), torch.randn(19, 8, generator=g)
    labels = torch.randint(0, 19, (tokens,), generator=g)
    labels[torch.rand(tokens, generator=g) < ignored] = IGNORE
    results = []
    for loss in (lambda h, w: chunked_linear_cross_entropy(h, w, labels, chunk), lambda h, w: _full(h, w, labels)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        value = loss(h, w)
        (value * 0.37).backward()
        results.append((value.detach(), h.grad, w.grad))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_the_loss_is_float32_for_bf16_inputs() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(64, 16, generator=g), torch.randn(100, 16, generator=g)
    labels = torch.randint(0, 100, (64,), generator=g)
    value = chunked_linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels, 16)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(_full(hidden, weight, labels).item(), rel=1e-2)


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.full((2, 4), 100.0)
    weight = torch.stack([torch.full((4,), 10.0), torch.full((4,), -10.0)])
    value = chunked_linear_cross_entropy(hidden, weight, torch.tensor([0, 1]), 1)
    assert value.item() == pytest.approx(8000.0)


def test_no_gradient_is_computed_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a gradient was computed in an evaluation")

    monkeypatch.setattr(torch, "mm", refuse)
    with torch.no_grad():
        value = chunked_linear_cross_entropy(torch.randn(3, 4), torch.randn(5, 4, requires_grad=True), torch.tensor([0, 1, 2]), 2)
    assert not value.requires_grad
