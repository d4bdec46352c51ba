"""Elementwise and row-wise work of a decoder block in Triton: one pass over memory each, float32 inside, the tensors' own type outside.

``peak`` (float32 [1] or None) is raised to the largest magnitude that a kernel writes: what a scale for fp8 is made of.
All functions work on the current CUDA device, or on CPU tensors where ``TRITON_INTERPRET=1`` was set before the first import.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows and columns of a tile that is written transposed as well.
_TILE = (64, 64)


@triton.jit
def _raise_to(peak_ptr, value):
    # Looking first spares all but a few of the atomics, which all go to one address.
    tl.atomic_max(peak_ptr, value, mask=value > tl.load(peak_ptr))


@triton.jit
def _turned(x, ptr):
    # By way of bf16, which is finer than fp8 by 4 bits or more: Triton 3.6 writes garbage where a tile that was computed in the kernel is
    # turned in float32 or fp8 (seen on an H200; tests/fast compares both layouts).
    return tl.trans(x.to(tl.bfloat16)).to(tl.float32).to(ptr.dtype.element_ty)


@triton.jit
def _rms_norm_forward(x_ptr, add_ptr, w_ptr, sum_ptr, y_ptr, rstd_ptr, peak_ptr, n, eps, ADD: tl.constexpr, PEAK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < n
    x = tl.load(x_ptr + row * n + col, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(add_ptr + row * n + col, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * n + col, rounded, mask=inside)
        x = rounded.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / n + eps)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd * tl.load(w_ptr + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * n + col, y.to(y_ptr.dtype.element_ty), mask=inside)
    if PEAK:
        _raise_to(peak_ptr, tl.max(tl.abs(y), 0))


@triton.jit
def _rms_norm_again(x_ptr, w_ptr, rstd_ptr, y_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = col < n
    x = tl.load(x_ptr + row * n + col, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.load(rstd_ptr + row) * tl.load(w_ptr + col, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * n + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, add_ptr, dx_ptr, dw_ptr, peak_ptr, rows, n, rounds, PEAK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    inside = col < n
    w = tl.load(w_ptr + col, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], dtype=tl.float32)
    peak = tl.zeros([ROWS], dtype=tl.float32)
    for i in range(rounds):
        row = ((program * rounds + i) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * n + col[None, :]
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) * rstd
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dw += tl.sum(dy * normed, 0)
        g = dy * w[None, :]
        dx = (g - normed * (tl.sum(g * normed, 1) / n)[:, None]) * rstd
        dx += tl.load(add_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if PEAK:
            peak = tl.maximum(peak, tl.max(tl.abs(dx), 1))
    tl.store(dw_ptr + program * n + col, dw, mask=inside)
    if PEAK:
        _raise_to(peak_ptr, tl.max(peak, 0))


@triton.jit
def _rotate(qkv_ptr, cos_ptr, sin_ptr, period, stride, HEADS: tl.constexpr, HEADS_2: tl.constexpr, HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_2)[:, None]
    d = tl.arange(0, HALF)[None, :]
    mask = head < HEADS
    at = (token % period) * (2 * HALF) + d
    cos = tl.load(cos_ptr + at).to(tl.float32)
    sin = tl.load(sin_ptr + at).to(tl.float32)
    p = qkv_ptr + token * stride + head * (2 * HALF) + d
    a = tl.load(p, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(p + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(p, (a * cos - b * sin).to(qkv_ptr.dtype.element_ty), mask=mask)
    tl.store(p + HALF, (b * cos + a * sin).to(qkv_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_back(
    dq_ptr, dk_ptr, dv_ptr, out_ptr, cos_ptr, sin_ptr, peak_ptr, period, length,
    q_row, q_pos, q_head, k_row, k_pos, k_head, v_row, v_pos, v_head,
    Q: tl.constexpr, KV: tl.constexpr, HEADS_2: tl.constexpr, HALF: tl.constexpr, PEAK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, position = token // length, token % length
    head = tl.arange(0, HEADS_2)[:, None]
    d = tl.arange(0, HALF)[None, :]
    is_q, is_k, is_v = head < Q, (head >= Q) & (head < Q + KV), (head >= Q + KV) & (head < Q + 2 * KV)
    q = dq_ptr + row * q_row + position * q_pos + head * q_head + d
    k = dk_ptr + row * k_row + position * k_pos + (head - Q) * k_head + d
    v = dv_ptr + row * v_row + position * v_pos + (head - Q - KV) * v_head + d
    a = tl.load(q, mask=is_q, other=0.0).to(tl.float32) + tl.load(k, mask=is_k, other=0.0).to(tl.float32)
    b = tl.load(q + HALF, mask=is_q, other=0.0).to(tl.float32) + tl.load(k + HALF, mask=is_k, other=0.0).to(tl.float32)
    at = (token % period) * (2 * HALF) + d
    cos = tl.load(cos_ptr + at).to(tl.float32)
    sin = tl.load(sin_ptr + at).to(tl.float32)
    first = a * cos + b * sin + tl.load(v, mask=is_v, other=0.0).to(tl.float32)
    second = b * cos - a * sin + tl.load(v + HALF, mask=is_v, other=0.0).to(tl.float32)
    out = out_ptr + token * ((Q + 2 * KV) * 2 * HALF) + head * (2 * HALF) + d
    tl.store(out, first.to(out_ptr.dtype.element_ty), mask=head < Q + 2 * KV)
    tl.store(out + HALF, second.to(out_ptr.dtype.element_ty), mask=head < Q + 2 * KV)
    if PEAK:
        _raise_to(peak_ptr, tl.max(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1), 0))


@triton.jit
def _swiglu_forward(gate_ptr, up_ptr, y_ptr, peak_ptr, rows, n, stride, PEAK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    mask = (row < rows) & (col < n)
    gate = tl.load(gate_ptr + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * n + col, y.to(y_ptr.dtype.element_ty), mask=mask)
    if PEAK:
        _raise_to(peak_ptr, tl.max(tl.max(tl.abs(y), 1), 0))


@triton.jit
def _swiglu_backward(
    gate_ptr, up_ptr, dy_ptr, y_ptr, peak_ptr, rows, n, stride, AGAIN: tl.constexpr, PEAK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)[None, :]
    mask = (row < rows) & (col < n)
    gate = tl.load(gate_ptr + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * n + col, mask=mask, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * s
    d_gate = dy * up * (s + silu * (1.0 - s))
    d_up = dy * silu
    tl.store(gate_ptr + row * stride + col, d_gate.to(gate_ptr.dtype.element_ty), mask=mask)
    tl.store(up_ptr + row * stride + col, d_up.to(up_ptr.dtype.element_ty), mask=mask)
    if AGAIN:
        tl.store(y_ptr + row * n + col, (silu * up).to(y_ptr.dtype.element_ty), mask=mask)
    if PEAK:
        _raise_to(peak_ptr, tl.max(tl.max(tl.maximum(tl.abs(d_gate), tl.abs(d_up)), 1), 0))


@triton.jit
def _cross_entropy(logits_ptr, label_ptr, loss_ptr, words, stride, ignored, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    p = logits_ptr + row * stride
    label = tl.load(label_ptr + row)
    col = tl.arange(0, BLOCK)
    if label == ignored:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENT:
            for start in range(0, words, BLOCK):
                tl.store(p + start + col, tl.zeros([BLOCK], dtype=logits_ptr.dtype.element_ty), mask=start + col < words)
    else:
        at_label = tl.load(p + label).to(tl.float32)
        largest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, words, BLOCK):
            x = tl.load(p + start + col, mask=start + col < words, other=float("-inf")).to(tl.float32)
            now = tl.maximum(largest, x)
            # A lane that has seen no word yet holds -inf: its difference would be NaN.
            total = total * tl.where(now == float("-inf"), 1.0, tl.exp(largest - now)) + tl.where(now == float("-inf"), 0.0, tl.exp(x - now))
            largest = now
        top = tl.max(largest, 0)
        log_norm = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
        tl.store(loss_ptr + row, log_norm - at_label)
        if GRADIENT:
            tl.debug_barrier()  # the label's logit must have been read before its place is overwritten
            for start in range(0, words, BLOCK):
                x = tl.load(p + start + col, mask=start + col < words, other=float("-inf")).to(tl.float32)
                g = tl.exp(x - log_norm)
                g = tl.where(start + col == label, g - 1.0, g)
                tl.store(p + start + col, g.to(logits_ptr.dtype.element_ty), mask=start + col < words)


@triton.jit
def _largest(x_ptr, peak_ptr, n, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    peak = tl.zeros([BLOCK], dtype=tl.float32)
    start = tl.program_id(0).to(tl.int64) * ROUNDS * BLOCK
    for i in range(ROUNDS):
        at = start + i * BLOCK + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.abs(tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)))
    _raise_to(peak_ptr, tl.max(peak, 0))


@triton.jit
def _quantise(
    x_ptr, rows_ptr, cols_ptr, peak_ptr, scale_ptr, m, k, LARGEST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    peak = tl.maximum(tl.load(peak_ptr), 1e-30)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, peak / LARGEST)
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    col = (tl.program_id(1) * BK + tl.arange(0, BK)).to(tl.int64)
    x = tl.load(x_ptr + row[:, None] * k + col[None, :], mask=(row < m)[:, None] & (col < k)[None, :], other=0.0).to(tl.float32)
    x = tl.minimum(tl.maximum(x * (LARGEST / peak), -LARGEST), LARGEST)
    if ROWS:
        tl.store(rows_ptr + row[:, None] * k + col[None, :], x.to(rows_ptr.dtype.element_ty), mask=(row < m)[:, None] & (col < k)[None, :])
    if COLS:
        tl.store(cols_ptr + col[:, None] * m + row[None, :], _turned(x, cols_ptr), mask=(col < k)[:, None] & (row < m)[None, :])


@triton.jit
def _swiglu_forward_scaled(
    gate_ptr, up_ptr, rows_ptr, cols_ptr, used_ptr, peak_ptr, scale_ptr, m, n, stride, LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    limit = tl.maximum(tl.load(used_ptr), 1e-30)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, limit / LARGEST)
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    col = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    mask = (row < m)[:, None] & (col < n)[None, :]
    at = row[:, None] * stride + col[None, :]
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    _raise_to(peak_ptr, tl.max(tl.max(tl.abs(y), 1), 0))
    y = tl.minimum(tl.maximum(y * (LARGEST / limit), -LARGEST), LARGEST)
    tl.store(rows_ptr + row[:, None] * n + col[None, :], y.to(rows_ptr.dtype.element_ty), mask=mask)
    tl.store(cols_ptr + col[:, None] * m + row[None, :], _turned(y, cols_ptr), mask=(col < n)[:, None] & (row < m)[None, :])


@triton.jit
def _swiglu_backward_scaled(
    gate_ptr, up_ptr, dy_ptr, rows_ptr, cols_ptr, used_ptr, peak_ptr, scale_ptr, m, n, stride,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    limit = tl.maximum(tl.load(used_ptr), 1e-30)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, limit / LARGEST)
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    col = (tl.program_id(1) * BN + tl.arange(0, BN)).to(tl.int64)
    mask = (row < m)[:, None] & (col < n)[None, :]
    mask_t = (col < n)[:, None] & (row < m)[None, :]
    at = row[:, None] * stride + col[None, :]
    gate = tl.load(gate_ptr + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row[:, None] * n + col[None, :], mask=mask, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * s
    d_gate = dy * up * (s + silu * (1.0 - s))
    d_up = dy * silu
    _raise_to(peak_ptr, tl.max(tl.max(tl.maximum(tl.abs(d_gate), tl.abs(d_up)), 1), 0))
    d_gate = tl.minimum(tl.maximum(d_gate * (LARGEST / limit), -LARGEST), LARGEST)
    d_up = tl.minimum(tl.maximum(d_up * (LARGEST / limit), -LARGEST), LARGEST)
    out = rows_ptr + row[:, None] * (2 * n) + col[None, :]
    tl.store(out, d_gate.to(rows_ptr.dtype.element_ty), mask=mask)
    tl.store(out + n, d_up.to(rows_ptr.dtype.element_ty), mask=mask)
    out = cols_ptr + col[:, None] * m + row[None, :]
    tl.store(out, _turned(d_gate, cols_ptr), mask=mask_t)
    tl.store(out + n.to(tl.int64) * m, _turned(d_up, cols_ptr), mask=mask_t)


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None, peak: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm of ``x + add`` (rounded to x's type): that sum [M, n] (``x`` itself without ``add``), the normed rows [M, n], 1/rms float32 [M]."""
    m, n = x.shape
    total = torch.empty_like(x) if add is not None else x
    y, rstd = torch.empty_like(x), torch.empty(m, dtype=torch.float32, device=x.device)
    _rms_norm_forward[(m,)](
        x, x if add is None else add, weight, total, y, rstd, rstd if peak is None else peak, n, eps,
        add is not None, peak is not None, triton.next_power_of_2(n), num_warps=4,
    )  # fmt: skip
    return total, y, rstd


def rms_norm_again(x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    """The normed rows once more, from what :func:`rms_norm_forward` gave."""
    y = torch.empty_like(x)
    _rms_norm_again[(x.shape[0],)](x, weight, rstd, y, x.shape[1], triton.next_power_of_2(x.shape[1]), num_warps=4)
    return y


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor, peak: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm: that of ``x`` [M, n] with ``add`` (what reached x past the norm) on top, and that of the weight [n]."""
    m, n = x.shape
    rows = 2
    programs = min(triton.cdiv(m, rows), 2112)  # 16 for each of an H200's 132 multiprocessors
    rounds = triton.cdiv(m, rows * programs)
    programs = triton.cdiv(m, rows * rounds)
    dx = torch.empty_like(x)
    dw = torch.empty(programs, n, dtype=torch.float32, device=x.device)
    _rms_norm_backward[(programs,)](
        dy, x, weight, rstd, add, dx, dw, dw if peak is None else peak, m, n, rounds, peak is not None, rows, triton.next_power_of_2(n), num_warps=8
    )
    return dx, dw.sum(0).to(weight.dtype)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """Rotary embedding of the first ``heads`` heads of ``qkv`` [M, heads_in_all * D], in place. cos, sin: [1 or B, S, D], their halves equal."""
    half = cos.shape[-1] // 2
    _rotate[(qkv.shape[0],)](
        qkv, cos, sin, cos.shape[0] * cos.shape[1], qkv.stride(0), heads, triton.next_power_of_2(heads), half, num_warps=4
    )  # fmt: skip


def rotate_back(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, peak: Tensor | None = None) -> Tensor:
    """Gradient of the unrotated qkv [B * S, (q + 2 kv) * D] from those of attention's inputs, [B, heads, S, D] each with any strides but the last."""
    b, q, s, d = dq.shape
    kv = dk.shape[1]
    out = torch.empty(b * s, (q + 2 * kv) * d, dtype=dq.dtype, device=dq.device)
    strides = [t.stride(i) for t in (dq, dk, dv) for i in (0, 2, 1)]
    _rotate_back[(b * s,)](
        dq, dk, dv, out, cos, sin, cos if peak is None else peak, cos.shape[0] * s, s, *strides,
        q, kv, triton.next_power_of_2(q + 2 * kv), d // 2, peak is not None, num_warps=4,
    )  # fmt: skip
    return out


def swiglu_forward(gate: Tensor, up: Tensor, peak: Tensor | None = None) -> Tensor:
    """silu(gate) * up, [M, n]; both may be halves of one matrix."""
    m, n = gate.shape
    y = torch.empty(m, n, dtype=gate.dtype, device=gate.device)
    _swiglu_forward[(triton.cdiv(m, 8), triton.cdiv(n, 256))](
        gate, up, y, gate if peak is None else peak, m, n, gate.stride(0), peak is not None, 8, 256, num_warps=8
    )
    return y


def swiglu_backward_(gate: Tensor, up: Tensor, dy: Tensor, again: bool, peak: Tensor | None = None) -> Tensor | None:
    """Overwrites gate and up with their gradients; returns silu(gate) * up once more where ``again``."""
    m, n = gate.shape
    y = torch.empty_like(dy) if again else None
    _swiglu_backward[(triton.cdiv(m, 8), triton.cdiv(n, 256))](
        gate, up, dy, dy if y is None else y, gate if peak is None else peak, m, n, gate.stride(0), again, peak is not None, 8, 256, num_warps=8
    )
    return y


def cross_entropy_(logits: Tensor, labels: Tensor, ignored: int, gradient: bool) -> Tensor:
    """-log softmax(logits)[label] of each row, float32 [M]; 0 for an ``ignored`` label. With ``gradient`` the logits become d loss / d logits."""
    m, words = logits.shape
    losses = torch.empty(m, dtype=torch.float32, device=logits.device)
    block = min(8192, triton.next_power_of_2(words))
    _cross_entropy[(m,)](logits, labels, losses, words, logits.stride(0), ignored, gradient, block, num_warps=16 if block == 8192 else 4)
    return losses


def largest_(x: Tensor, peak: Tensor) -> None:
    """Raises ``peak`` to the largest magnitude in ``x`` (contiguous)."""
    _largest[(triton.cdiv(x.numel(), 4096 * 8),)](x, peak, x.numel(), 8, 4096, num_warps=8)


def quantise(x: Tensor, peak: Tensor, dtype: torch.dtype, rows: Tensor | None, cols: Tensor | None) -> Tensor:
    """``x`` [m, k] in fp8 under one scale, written to ``rows`` [m, k] and, transposed, to ``cols`` [k, m]; returns the scale, float32 [1]:
    x is about rows * scale. ``peak`` is the largest magnitude; what exceeds it is clipped."""
    m, k = x.shape
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    _quantise[(triton.cdiv(m, 64), triton.cdiv(k, 128))](
        x, x if rows is None else rows, x if cols is None else cols, peak, scale, m, k,
        torch.finfo(dtype).max, rows is not None, cols is not None, 64, 128, num_warps=8,
    )  # fmt: skip
    return scale


def swiglu_forward_scaled(gate: Tensor, up: Tensor, limit: Tensor, peak: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up in fp8 under a scale that makes ``limit`` the largest number: by rows [M, n], transposed [n, M], and the scale, float32 [1]."""
    m, n = gate.shape
    rows, cols = torch.empty(m, n, dtype=dtype, device=gate.device), torch.empty(n, m, dtype=dtype, device=gate.device)
    scale = torch.empty(1, dtype=torch.float32, device=gate.device)
    _swiglu_forward_scaled[(triton.cdiv(m, _TILE[0]), triton.cdiv(n, _TILE[1]))](
        gate, up, rows, cols, limit, peak, scale, m, n, gate.stride(0), torch.finfo(dtype).max, *_TILE, num_warps=4
    )
    return rows, cols, scale


def swiglu_backward_scaled(gate: Tensor, up: Tensor, dy: Tensor, limit: Tensor, peak: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of gate and up side by side, as :func:`swiglu_forward_scaled` gives its result: [M, 2n], [2n, M] and the scale."""
    m, n = gate.shape
    rows, cols = torch.empty(m, 2 * n, dtype=dtype, device=gate.device), torch.empty(2 * n, m, dtype=dtype, device=gate.device)
    scale = torch.empty(1, dtype=torch.float32, device=gate.device)
    _swiglu_backward_scaled[(triton.cdiv(m, _TILE[0]), triton.cdiv(n, _TILE[1]))](
        gate, up, dy, rows, cols, limit, peak, scale, m, n, gate.stride(0), torch.finfo(dtype).max, *_TILE, num_warps=4
    )
    return rows, cols, scale
