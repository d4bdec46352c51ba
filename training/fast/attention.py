"""Causal attention: which of PyTorch's kernels, and its two passes as plain calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def cudnn_is_faster() -> bool:
    """Whether this GPU runs cuDNN's attention faster than FlashAttention 2: so on Hopper (46 against 80 ms a step of Qwen2.5-1.5B, docs/speed.md)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and bool(torch.backends.cudnn.is_available())  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def preferred_kernels() -> Iterator[None]:
    """Inside, ``scaled_dot_product_attention`` tries the fastest kernel of this GPU first; shapes that it refuses go to the next."""
    if not cudnn_is_faster():
        yield
        return
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


class Attended(NamedTuple):
    """Attention's inputs and output with the graph between them, [B, heads, S, D] each."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


def attend(qkv: Tensor, batch: int, heads: int, kv_heads: int, head_dim: int) -> Attended:
    """Causal attention over ``qkv`` [B * S, (heads + 2 kv_heads) * D], which is only looked at and not copied. Its gradient: :func:`attend_back`."""
    parts = torch.split(qkv.view(batch, -1, heads + 2 * kv_heads, head_dim), [heads, kv_heads, kv_heads], dim=2)
    q, k, v = (part.transpose(1, 2).detach().requires_grad_() for part in parts)
    with torch.enable_grad():
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
    return Attended(q, k, v, out)


def attend_back(attended: Attended, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for that of the output, ``d_out`` [B * S, heads * D]."""
    b, h, s, d = attended.out.shape
    dq, dk, dv = torch.autograd.grad(attended.out, attended[:3], d_out.view(b, s, h, d).transpose(1, 2))
    return dq, dk, dv
