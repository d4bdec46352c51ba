"""A decoder block of Qwen2's and Llama's kind, forward and backward written by hand as one autograd node.

It reads the parameters of transformers' own module, so names, checkpoints and export stay as they are. What it wins over compiled
modules (docs/speed.md): QKV in one product, elementwise work in one pass each, and nothing kept or computed twice by accident.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from training.fast import kernels
from training.fast.attention import Attended, attend, attend_back
from training.fast.products import Products


class Weights(NamedTuple):
    """The block's parameters, as torch.nn.Linear holds them ([out, in]); biases of q, k and v or None."""

    norm_1: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    o: Tensor
    norm_2: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    @classmethod
    def of(cls, layer: Any) -> Weights:
        """Those of a transformers decoder layer."""
        a, m = layer.self_attn, layer.mlp
        return cls(
            layer.input_layernorm.weight, a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, a.q_proj.bias, a.k_proj.bias, a.v_proj.bias, a.o_proj.weight,
            layer.post_attention_layernorm.weight, m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight,
        )  # fmt: skip


class How(NamedTuple):
    """Everything of a block that has no gradient."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    eps_1: float
    eps_2: float
    cos: Tensor
    sin: Tensor
    mm: Products
    recompute: str


class _Kept(NamedTuple):
    """What the forward pass has for the backward pass. Operands (h_1, out, h_2, act) are as ``mm.for_backward`` gives them; None: made again."""

    h_1: Any
    rstd_1: Tensor
    attended: Attended
    out: Any
    x_2: Tensor
    h_2: Any
    rstd_2: Tensor
    gate_up: Tensor
    act: Any
    qkv_weights: Any
    o_weights: Any
    gate_up_weights: Any
    down_weights: Any


def _forward(x: Tensor, w: Weights, how: How) -> tuple[_Kept, Any, Any]:
    """All but the last product, whose two operands come second and third; ``x`` [M, d]."""
    mm, device = how.mm, x.device
    peak = mm.peak(device)
    _, h, rstd_1 = kernels.rms_norm_forward(x, w.norm_1, how.eps_1, peak=peak)
    h_1 = mm.operand(h, peak)
    # Small next to the rest, and three narrow products would leave most of a large GPU idle.
    qkv_weights = mm.weights([torch.cat((w.q, w.k, w.v))])
    bias = torch.cat((w.q_bias, w.k_bias, w.v_bias)) if w.q_bias is not None and w.k_bias is not None and w.v_bias is not None else None
    qkv = mm.forward(h_1, qkv_weights, bias)
    kernels.rotate_(qkv, how.cos, how.sin, how.heads + how.kv_heads)
    attended = attend(qkv, how.batch, how.heads, how.kv_heads, how.head_dim)
    out = mm.operand(attended.out.detach().transpose(1, 2).reshape(x.shape[0], -1))
    o_weights = mm.weights([w.o])
    peak = mm.peak(device)
    x_2, h, rstd_2 = kernels.rms_norm_forward(x, w.norm_2, how.eps_2, add=mm.forward(out, o_weights), peak=peak)
    h_2 = mm.operand(h, peak)
    del h
    gate_up_weights = mm.weights([w.gate, w.up])
    gate_up = mm.forward(h_2, gate_up_weights)
    act = mm.activation(gate_up)
    down_weights = mm.weights([w.down])
    keep = mm.for_backward
    kept = _Kept(
        keep(h_1), rstd_1, attended, keep(out), x_2, keep(h_2), rstd_2, gate_up, keep(act),
        keep(qkv_weights), keep(o_weights), keep(gate_up_weights), keep(down_weights),
    )  # fmt: skip
    return kept, act, down_weights


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: How, hidden: Tensor, *weights: Tensor | None) -> Tensor:
        w = Weights(*cast(Any, weights))
        x = hidden.reshape(-1, hidden.shape[-1])
        kept, act, down = _forward(x, w, how)
        # A tensor of its own and not a view: FSDP hangs the hook that gathers the weights for the backward pass on it.
        y = torch.add(how.mm.forward(act, down).view(hidden.shape), kept.x_2.view(hidden.shape))
        # Not by save_for_backward: operands may be more than tensors. Weights that FSDP frees and gathers again keep their identity.
        ctx.how, ctx.x, ctx.w = how, x, w
        if how.recompute == "none":
            ctx.kept = kept
        elif how.recompute == "selective":
            ctx.kept = kept._replace(h_1=None, h_2=None, act=kept.act if how.mm.keeps_activation else None)
        else:
            ctx.kept = None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        how, x, w, kept = ctx.how, ctx.x, ctx.w, ctx.kept
        ctx.x = ctx.w = ctx.kept = None  # else all would live until the last block's gradient is done
        mm = how.mm
        if kept is None:
            kept, _, _ = _forward(x, w, how)
        dx = grads[0].reshape(x.shape).contiguous()

        dy = mm.operand(dx, gradient=True)
        d_act = mm.input_gradient(dy, kept.down_weights)
        d_gate_up, again = mm.activation_gradient(kept.gate_up, d_act, kept.act is None)
        d_down = mm.weight_gradient(dy, kept.act if again is None else again)
        dy = d_gate_up
        kept = kept._replace(gate_up=None, act=None)
        del d_act, again, d_gate_up
        dh = mm.input_gradient(dy, kept.gate_up_weights)
        h_2 = kept.h_2 if kept.h_2 is not None else mm.operand(kernels.rms_norm_again(kept.x_2, w.norm_2, kept.rstd_2))
        d_gate, d_up = mm.weight_gradient(dy, h_2).chunk(2)
        del dy, h_2
        peak = mm.peak(x.device)
        dx, d_norm_2 = kernels.rms_norm_backward(dh, kept.x_2, w.norm_2, kept.rstd_2, dx, peak)

        dy = mm.operand(dx, peak, gradient=True)
        d_out = mm.input_gradient(dy, kept.o_weights)
        d_o = mm.weight_gradient(dy, kept.out)
        peak = mm.peak(x.device)
        d_qkv = kernels.rotate_back(*attend_back(kept.attended, d_out), how.cos, how.sin, peak)
        del d_out
        dy = mm.operand(d_qkv, peak, gradient=True)
        sizes = [w.q.shape[0], w.k.shape[0], w.v.shape[0]]
        d_biases = torch.split(d_qkv.sum(0, dtype=torch.float32).to(d_qkv.dtype), sizes) if w.q_bias is not None else (None, None, None)
        dh = mm.input_gradient(dy, kept.qkv_weights)
        h_1 = kept.h_1 if kept.h_1 is not None else mm.operand(kernels.rms_norm_again(x, w.norm_1, kept.rstd_1))
        d_weights = torch.split(mm.weight_gradient(dy, h_1), sizes)
        dx, d_norm_1 = kernels.rms_norm_backward(dh, x, w.norm_1, kept.rstd_1, dx)
        return None, dx.view(grads[0].shape), d_norm_1, *d_weights, *d_biases, d_o, d_norm_2, d_gate, d_up, d_down  # hidden, then as Weights has them


def install(layer: Any, config: Any, training: Products, recompute: str) -> None:
    """Replaces the forward pass of a transformers decoder layer. Where tokens need a mask beyond the causal one, transformers' own runs.

    ``training``: the products while gradients are taken; without (evaluation) they are those of the weights' own type.
    """
    plain = Products()
    own: Callable[..., Any] = layer.forward
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, layer.self_attn.head_dim
    eps = layer.input_layernorm.variance_epsilon, layer.post_attention_layernorm.variance_epsilon

    def forward(_self: nn.Module, hidden_states: Tensor, attention_mask: Any = None, position_embeddings: Any = None, **rest: Any) -> Any:
        # While a graph is recorded transformers can't look whether it needs its mask, and makes one; it is the causal one, as in the step before.
        masked = attention_mask is not None and not (hidden_states.is_cuda and torch.cuda.is_current_stream_capturing())
        if masked or rest.get("past_key_values") is not None:
            return own(hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **rest)
        cos, sin = position_embeddings
        mm = training if torch.is_grad_enabled() else plain
        how = How(hidden_states.shape[0], heads, kv_heads, head_dim, *eps, cos.contiguous(), sin.contiguous(), mm, recompute)
        return _Block.apply(how, hidden_states, *Weights.of(layer))  # type: ignore[no-untyped-call]

    layer.forward = types.MethodType(forward, layer)
