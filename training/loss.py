"""Cross-entropy over a large vocabulary without the full logits matrix, and the loss as a method that FSDP knows of.

Qwen2.5's 151,936 words make 0.6 MB of float32 logits a token, and as much again for their gradient. Here only ``chunk``
tokens' logits exist at a time; their gradients are taken in the forward pass, so that nothing is recomputed later.
"""

from __future__ import annotations

import importlib.util
import types
from typing import Any, cast

import torch
from torch import Tensor, nn

IGNORE = -100

# Architectures whose logits are lm_head(last hidden state) and nothing else (no soft-capping, scaling or bias); read in
# transformers 5.13, models/*/modeling_*.py. Others get their own forward pass, with the whole logits matrix.
PLAIN_HEADS = frozenset({"qwen2", "qwen3", "llama", "mistral"})


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, training: bool) -> Tensor:
        rows = _rows_by_kernel if hidden.is_cuda and importlib.util.find_spec("triton") is not None else _rows
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if training else None
        # Float32: a sum over chunks in bf16 would lose the late chunks' share.
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if training else None
        for start in range(0, hidden.shape[0], chunk):
            h, y = hidden[start : start + chunk], labels[start : start + chunk]
            loss, d_logits = rows(h @ weight.t(), y, training)
            total += loss
            if d_hidden is None or d_weight is None:
                continue
            torch.mm(d_logits, weight, out=d_hidden[start : start + chunk])
            if d_logits.is_cuda and d_logits.dtype != torch.float32:
                torch.addmm(d_weight, d_logits.t(), h, out_dtype=torch.float32, out=d_weight)
            else:
                d_weight += torch.mm(d_logits.t(), h)
        if d_hidden is not None and d_weight is not None:
            ctx.save_for_backward(d_hidden, d_weight)
            ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grads[0].to(d_hidden.dtype), (d_weight * grads[0]).to(ctx.weight_dtype), None, None, None


def _rows(logits: Tensor, labels: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """Sum of the rows' losses, float32, and d loss / d logits in the logits' type (unspecified without ``gradient``)."""
    wide = logits.float()
    valid = (labels != IGNORE).unsqueeze(1)
    target = labels.clamp(min=0).unsqueeze(1)
    log_norm = torch.logsumexp(wide, dim=1, keepdim=True)
    loss = ((log_norm - wide.gather(1, target)) * valid).sum()
    if not gradient:
        return loss, logits
    d_logits = (wide - log_norm).exp_()  # softmax
    d_logits.scatter_add_(1, target, torch.full_like(log_norm, -1.0))
    return loss, d_logits.mul_(valid).to(logits.dtype)


def _rows_by_kernel(logits: Tensor, labels: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """As :func:`_rows`, in one kernel; the logits are overwritten."""
    from training.fast import kernels

    return kernels.cross_entropy_(logits, labels, IGNORE, gradient).sum(), logits


def chunked_linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Sum over tokens of -log softmax(hidden @ weight.T)[label]: a float32 scalar whatever the inputs' type.

    hidden [T, d], weight [V, d] in one floating type; labels int64 [T], -100 is left out; ``chunk`` tokens at a time.
    """
    # Asked here: inside an autograd function gradients are always off.
    training = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return cast(Tensor, _ChunkedLinearCrossEntropy.apply(hidden, weight, labels, chunk, training))  # type: ignore[no-untyped-call]


def _token_loss(self: Any, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None, chunk: int) -> Tensor:
    if self.config.model_type in PLAIN_HEADS:
        hidden = self.get_decoder()(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state
        return chunked_linear_cross_entropy(hidden.flatten(0, 1), self.get_output_embeddings().weight, labels.flatten(), chunk)
    logits = self(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def add_token_loss(model: nn.Module) -> None:
    """Gives ``model`` the method ``token_loss(input_ids, labels, position_ids, chunk) -> float32 scalar`` (a sum over tokens).

    A method of the model, and not a function beside it, because the head's weight is whole only inside a forward pass that FSDP
    has wrapped: ``register_fsdp_forward_method(model, "token_loss")`` after sharding.
    """
    model.token_loss = types.MethodType(_token_loss, model)  # type: ignore[assignment]
