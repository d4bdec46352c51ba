"""Which of the fast pieces a run uses: one function, which says what it picked and why."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import torch

from training.errors import BadInput

# Blocks that training/fast/block.py computes exactly: RMSNorm, rotary attention without q/k norms, SwiGLU; read in transformers 5.13.
KNOWN_BLOCKS = frozenset({"qwen2", "llama"})


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How a block is computed: ``plain`` (transformers' modules as they are), ``compiled`` (the same under torch.compile) or ``fast``
    (training/fast/block.py), its products in fp8 or not, and the reason as half a sentence."""

    blocks: str
    fp8: bool
    why: str

    def __str__(self) -> str:
        return f"{self.blocks} blocks{' in fp8' if self.fp8 else ''}: {self.why}"


def choose(config: Any, device: torch.device, blocks: str, precision: str, row_length: int, document_mask: bool) -> Pieces:
    """``blocks`` and ``precision`` as in the settings; ``row_length`` in tokens. Raises BadInput where ``blocks: fast`` can't be had."""
    obstacle = _obstacle(config, device, document_mask)
    if blocks == "fast" and obstacle is not None:
        raise BadInput(f"blocks = fast: {obstacle}; use blocks = auto")
    if blocks == "auto":
        chosen = "plain" if device.type != "cuda" else "fast" if obstacle is None else "compiled"
        why = "on a CPU compiling costs more than a short run wins" if device.type != "cuda" else obstacle or f"{config.model_type} is known"
    else:
        chosen, why = blocks, "as set"
    if precision != "fp8":
        return Pieces(chosen, False, why)
    missing = _fp8_obstacle(config, device, row_length) if chosen == "fast" else f"only blocks = fast has it, and they are {chosen} ({why})"
    if missing is not None:
        return Pieces(chosen, False, f"{why}; bf16 instead of fp8: {missing}")
    return Pieces(chosen, True, why)


def _obstacle(config: Any, device: torch.device, document_mask: bool) -> str | None:
    """What keeps the fast block away, or None."""
    if config.model_type not in KNOWN_BLOCKS:
        return f"model type {config.model_type} is not one of {', '.join(sorted(KNOWN_BLOCKS))}"
    if config.hidden_act != "silu" or getattr(config, "mlp_bias", False) or getattr(config, "attention_dropout", 0.0):
        return "its activation, biases or dropout differ from what the block computes"
    if config.model_type == "llama" and getattr(config, "attention_bias", False):
        return "it has a bias on attention's output"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "some of its layers attend through a sliding window"
    if document_mask:
        return "documentMask needs an attention mask"
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return "it needs a CUDA GPU and Triton"
    return None


def _fp8_obstacle(config: Any, device: torch.device, row_length: int) -> str | None:
    """What keeps fp8 products away, or None. Tensor cores take it from Ada on (8.9), in multiples of 16."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}.{capability[1]}) has no fp8"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    odd = [n for n in (config.hidden_size, config.intermediate_size, config.num_key_value_heads * head_dim, row_length) if n % 16]
    return f"a size of {odd[0]} is not a multiple of 16" if odd else None
