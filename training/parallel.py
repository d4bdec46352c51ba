"""How the model is laid over the workers: mesh, FSDP2 units, mixed precision, recompute, and how blocks are computed."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from training.errors import BadInput
from training.fast.choose import Pieces
from training.world import World

if TYPE_CHECKING:
    from training.fast.products import Products

# What selective recompute keeps: matrix products and attention are the dear ones; the rest (norms, SwiGLU, rotary) is cheap to redo.
_KEPT_OPS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")
    if hasattr(torch.ops.aten, name)
)


def make_mesh(world: World, parallel: str) -> DeviceMesh:
    """fsdp: (size,) "shard". hsdp: (hosts, local_size) "replicate", "shard"; ranks of a host are neighbours.

    Raises BadInput where hsdp is asked for and the hosts hold unequal numbers of workers.
    """
    if parallel == "hsdp":
        if not world.even:
            raise BadInput(f"parallel = hsdp needs as many workers on each host; {world.size} workers on {len(world.hosts)} hosts are not. Use fsdp")
        shape = (world.size // world.local_size, world.local_size)
        return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("shard",))


def decoder_layers(model: Any) -> nn.ModuleList:
    """The model's transformer blocks. Raises BadInput for an architecture without a plain list of them."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise BadInput(f"model type {model.config.model_type}: its blocks are not a plain list, so they can't be sharded one by one; use qwen2, qwen3 or llama")
    return layers


def prepare_blocks(model: Any, activation_checkpointing: str, pieces: Pieces) -> list[Products]:
    """Fast blocks, or recompute and compile, block by block; before sharding, so that FSDP's own work stays outside the compiled part.

    Returns the products of the fast blocks, none where they are not.
    """
    if pieces.blocks == "fast":
        from training.fast import block  # Triton is not everywhere
        from training.fast.products import Fp8Products, Products

        layers = decoder_layers(model)
        products = [Fp8Products() if pieces.fp8 else Products() for _ in layers]
        for layer, mm in zip(layers, products, strict=True):
            block.install(layer, model.config, mm, activation_checkpointing)
        return products
    if activation_checkpointing != "none":
        arguments: dict[str, Any] = {"use_reentrant": False}
        if activation_checkpointing == "selective":
            arguments["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_dear_ops)
        # transformers' own switch and not a wrapper: a wrapper would put its name into every parameter's.
        model.gradient_checkpointing_enable(arguments)
    if pieces.blocks == "compiled":
        for layer in decoder_layers(model):
            layer.compile(fullgraph=True)
    return []


def _keep_dear_ops(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def shard(model: Any, mesh: DeviceMesh, *, reshard: bool, compute_dtype: torch.dtype, reduce_dtype: torch.dtype, together: int = 1) -> None:
    """Applies FSDP2 in place: a unit for each ``together`` blocks, and the root for embedding, last norm and head.

    The embedding and a head tied to it must be in one unit (the root), or the shared weight becomes two.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    layers = list(decoder_layers(model))
    for first in range(0, len(layers), together):
        fully_shard(layers[first : first + together], mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    register_fsdp_forward_method(model, "token_loss")


def reshard(model: Any) -> None:
    """Frees all gathered weights: after a forward pass without a backward pass they stay where they are, and would be taken for the current ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
