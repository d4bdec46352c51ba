"""AdamW on this rank's shards, and the gradient norm that it is clipped by."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from training.settings import Settings


class AdamW(torch.optim.AdamW):
    """Fused AdamW whose kernels get the local shards: by way of DTensor each step takes the CPU three times as long. Its state stays DTensors, which
    is what checkpoints know how to lay over another number of ranks."""

    grad_scale: Tensor | None = None

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        is_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = [_local(t) for t in tensors]
        return is_complex

    def update(self, divisor: Tensor | None) -> None:
        """A step with all gradients divided by ``divisor`` (a scalar on their device; None: as they are), in the same kernel."""
        self.grad_scale = divisor
        self.step()
        self.grad_scale = None

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """The global 2-norm of all gradients, a float32 scalar on their device; without a host sync. A collective of ranks that hold different shards."""
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        square = nn.utils.get_total_norm([_local(grad) for grad in grads]).square()
        if isinstance(grads[0], DTensor):
            # One layout for all: under hsdp each host has all shards.
            mesh, shard = grads[0].device_mesh, next(i for i, placement in enumerate(grads[0].placements) if placement.is_shard())
            if mesh.size(shard) > 1:
                dist.all_reduce(square, group=mesh.get_group(shard))
        return square.sqrt()


def make_optimizer(model: nn.Module, settings: Settings) -> AdamW:
    """In float32; weight decay on matrices, not on norms and biases."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # A rate that is a tensor would be one more thing to shard; a float is set before each step.
    return AdamW(groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), fused=True)


def divisor(norm: Tensor, limit: float) -> Tensor | None:
    """What gradients of global norm ``norm`` are divided by to have one of at most ``limit``; None where ``limit`` is 0, and nothing is clipped.

    The reciprocal of torch.nn.utils.clip_grad_norm_'s factor.
    """
    return ((norm + 1e-6) / limit).clamp(min=1.0) if limit > 0 else None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
