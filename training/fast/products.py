"""The matrix products of a block, in its own type or in fp8: one interface, so that the block is written once.

A product knows three forms, for x [M, K], weights w [N, K] and dy [M, N]: forward x w^T, input gradient dy w, weight gradient dy^T x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from training.fast import kernels


class Products:
    """In the tensors' own type. Several weights stand for their rows one below the other, but are never copied into one."""

    keeps_activation = False
    """Whether the MLP's activation is kept even where recompute is selective."""

    def forget(self) -> None:
        """Drops what was learnt of the tensors so far."""

    def peak(self, _device: torch.device) -> Tensor | None:
        """A place for the largest magnitude of a tensor that is about to be written; None: not needed."""
        return None

    def operand(self, x: Tensor, _peak: Tensor | None = None, gradient: bool = False) -> Any:
        """``x`` [M, K] as the products take it; ``gradient`` for a dy."""
        return x

    def activation(self, gate_up: Tensor) -> Any:
        """The operand silu(gate) * up, [M, n], of gate and up side by side [M, 2n]."""
        return kernels.swiglu_forward(*gate_up.chunk(2, dim=1))

    def activation_gradient(self, gate_up: Tensor, d_act: Tensor, again: bool) -> tuple[Any, Any]:
        """The gradient operand of ``gate_up``, which is overwritten, and :meth:`activation` once more where ``again``."""
        gate, up = gate_up.chunk(2, dim=1)
        act = kernels.swiglu_backward_(gate, up, d_act, again)
        return gate_up, act

    def weights(self, weights: Sequence[Tensor]) -> Any:
        """The weights as :meth:`forward` takes them."""
        return weights

    def for_backward(self, operand: Any) -> Any:
        """What must be kept of an operand or of weights for the two gradients."""
        return operand

    def forward(self, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
        """x w^T + bias, [M, sum of N]."""
        if len(weights) == 1:
            return torch.mm(x, weights[0].t()) if bias is None else torch.addmm(bias, x, weights[0].t())
        assert bias is None
        out = torch.empty(x.shape[0], sum(w.shape[0] for w in weights), dtype=x.dtype, device=x.device)
        for w, part in zip(weights, torch.split(out, [w.shape[0] for w in weights], dim=1), strict=True):
            torch.mm(x, w.t(), out=part)
        return out

    def input_gradient(self, dy: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """dy w, [M, K]."""
        parts = torch.split(dy, [w.shape[0] for w in weights], dim=1)
        dx = torch.mm(parts[0], weights[0])
        for part, w in zip(parts[1:], weights[1:], strict=True):
            dx.addmm_(part, w)
        return dx

    def weight_gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """dy^T x, [sum of N, K]."""
        return torch.mm(dy.t(), x)


class Scaled(NamedTuple):
    """A matrix in fp8 under one scale (matrix = fp8 * scale), by rows [m, k] and, transposed, by columns [k, m]; as far as it is needed."""

    rows: Tensor | None
    cols: Tensor | None
    scale: Tensor


class Fp8Products(Products):
    """In fp8 with one scale a tensor, made from the tensor itself: e4m3 forward, e5m2 for gradients; sums and results as without it.

    An e4m3 value reaches 448 with 3 bits behind the point, e5m2 57344 with 2: gradients need the range (Micikevicius et al., arXiv:2209.05433).

    Two tensors are too large to be written in bf16, looked through and written again: SwiGLU's result and its gradient. They are written
    in fp8 at once, under a scale from the largest magnitude that this block has seen before, with room for twice as much; beyond it values
    are clipped. That memory fades by 2% a micro-step, and is made anew (exactly, by the long way) in the first micro-step after a start.
    """

    ROOM, FADE = 2.0, 0.98
    keeps_activation = True

    def __init__(self) -> None:
        self._seen: dict[str, Tensor] = {}

    def forget(self) -> None:
        """The next micro-step takes the long way."""
        self._seen.clear()

    def _limit(self, name: str) -> tuple[Tensor, Tensor]:
        """What ``name`` is scaled to, and a new place for what it turns out to be."""
        peak = torch.zeros_like(self._seen[name])
        return self._seen[name] * self.ROOM, peak

    def _note(self, name: str, peak: Tensor) -> None:
        seen = self._seen.get(name)
        if seen is None:
            self._seen[name] = peak
        else:
            torch.maximum(peak, seen * self.FADE, out=seen)  # in place, for a graph that is replayed

    def activation(self, gate_up: Tensor) -> Scaled:
        """By the long way at first, then in one kernel."""
        gate, up = gate_up.chunk(2, dim=1)
        if "activation" not in self._seen:
            peak = torch.zeros(1, dtype=torch.float32, device=gate_up.device)
            act = self.operand(kernels.swiglu_forward(gate, up, peak), peak)
        else:
            limit, peak = self._limit("activation")
            act = Scaled(*kernels.swiglu_forward_scaled(gate, up, limit, peak, torch.float8_e4m3fn))
        self._note("activation", peak)
        return act

    def activation_gradient(self, gate_up: Tensor, d_act: Tensor, again: bool) -> tuple[Scaled, None]:
        """As :meth:`activation`. The activation itself is never asked for again: in fp8 it is small enough to be kept."""
        assert not again
        gate, up = gate_up.chunk(2, dim=1)
        if "gradient" not in self._seen:
            peak = torch.zeros(1, dtype=torch.float32, device=gate_up.device)
            kernels.swiglu_backward_(gate, up, d_act, False, peak)
            gradient = self.operand(gate_up, peak, gradient=True)
        else:
            limit, peak = self._limit("gradient")
            gradient = Scaled(*kernels.swiglu_backward_scaled(gate, up, d_act, limit, peak, torch.float8_e5m2))
        self._note("gradient", peak)
        return gradient, None

    def peak(self, device: torch.device) -> Tensor | None:
        """A float32 zero that the kernels raise."""
        return torch.zeros(1, dtype=torch.float32, device=device)

    def operand(self, x: Tensor, peak: Tensor | None = None, gradient: bool = False) -> Scaled:
        """Both layouts of ``x``; ``peak`` where the kernel that wrote it has found its largest magnitude already."""
        if peak is None:
            peak = torch.zeros(1, dtype=torch.float32, device=x.device)
            kernels.largest_(x, peak)
        dtype = torch.float8_e5m2 if gradient else torch.float8_e4m3fn
        m, k = x.shape
        rows, cols = torch.empty(m, k, dtype=dtype, device=x.device), torch.empty(k, m, dtype=dtype, device=x.device)
        return Scaled(rows, cols, kernels.quantise(x, peak, dtype, rows, cols))

    def weights(self, weights: Sequence[Tensor]) -> Scaled:
        """All weights as one matrix."""
        return self.operand(torch.cat(tuple(weights)) if len(weights) > 1 else weights[0])

    def for_backward(self, operand: Scaled) -> Scaled:
        """The transposed layout alone."""
        return operand._replace(rows=None)

    def forward(self, x: Scaled, weights: Scaled, bias: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """x w^T + bias in bf16."""
        assert x.rows is not None
        assert weights.rows is not None
        return _product(x.rows, weights.rows.t(), x.scale, weights.scale, bias)

    def input_gradient(self, dy: Scaled, weights: Scaled) -> Tensor:  # type: ignore[override]
        """dy w in bf16."""
        assert dy.rows is not None
        assert weights.cols is not None
        return _product(dy.rows, weights.cols.t(), dy.scale, weights.scale, None)

    def weight_gradient(self, dy: Scaled, x: Scaled) -> Tensor:  # type: ignore[override]
        """dy^T x in bf16."""
        assert dy.cols is not None
        assert x.cols is not None
        return _product(dy.cols, x.cols.t(), dy.scale, x.scale, None)


def _product(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None) -> Tensor:
    return torch._scaled_mm(a, b, a_scale, b_scale, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True)
