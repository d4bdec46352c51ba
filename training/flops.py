"""How many parameters a decoder has and how many FLOPs a token of it costs: arithmetic on its shape, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from training.errors import BadInput

SUPPORTED = ("qwen2", "qwen3", "llama")


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A Qwen2, Qwen3 or Llama decoder by its sizes; counts are of elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    block_vectors: int = 0
    """Norm weights and biases of one block beyond its two RMSNorms: Qwen2's q/k/v biases, Qwen3's q/k norms, biases switched on by the configuration."""

    @property
    def block_parameters(self) -> int:
        """Parameters of one decoder block."""
        attention = 2 * self.hidden * self.heads * self.head_dim + 2 * self.hidden * self.kv_heads * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden + self.block_vectors

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding alone, which is the output head too where they are tied."""
        return self.vocab * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: embedding, last norm and a head of its own."""
        return self.embedding_parameters * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, a tied embedding counted once (what ``model.parameters()`` of transformers sums to)."""
        return self.root_parameters + self.layers * self.block_parameters

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """The shape that a transformers configuration (``config.to_dict()``, or a model's config.json) describes.

        Raises BadInput for an architecture without a rule here, or a configuration without one of its sizes.
        """
        kind = config.get("model_type")
        if kind not in SUPPORTED:
            raise BadInput(f"model_type = {kind!r}: sizes are known for {', '.join(SUPPORTED)}; use one of these")
        hidden, heads, intermediate = _size(config, "hidden_size"), _size(config, "num_attention_heads"), _size(config, "intermediate_size")
        kv_heads = _size(config, "num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
        # Qwen3's head size is independent of the hidden size and 128 unless the configuration says otherwise.
        head_dim = _size(config, "head_dim") if config.get("head_dim") is not None else 128 if kind == "qwen3" else hidden // heads
        q, kv = heads * head_dim, kv_heads * head_dim
        vectors = 0
        if kind == "qwen2":
            vectors += q + 2 * kv
        elif config.get("attention_bias"):
            vectors += q + 2 * kv + hidden
        if kind == "qwen3":
            vectors += 2 * head_dim
        if kind == "llama" and config.get("mlp_bias"):
            vectors += 2 * intermediate + hidden
        return cls(
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=intermediate,
            vocab=_size(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            block_vectors=vectors,
        )


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadInput(f"model configuration: {key} = {value!r}: a whole number above 0 expected")
    return value


def flops_per_token(shape: ModelShape, sequence_length: int, causal: bool = True) -> float:
    """FLOPs of forward and backward for one token in a row of ``sequence_length`` tokens, recomputation not counted.

    6·N for the matrix products, N being the parameters that are multiplied with (a lookup in an untied input embedding is free), plus
    attention's score and value products: 12·L·d·s when every token is counted as seeing the whole row (PaLM, arXiv:2204.02311, appendix B;
    torchtitan), or half of that, 6·L·d·s, for the causal half that a flash kernel really computes. d is heads x head_dim.
    """
    multiplied = shape.parameters - (0 if shape.tied else shape.embedding_parameters)
    return 6.0 * multiplied + (6.0 if causal else 12.0) * shape.layers * shape.heads * shape.head_dim * sequence_length


def mfu(tokens_per_second_per_gpu: float, shape: ModelShape, sequence_length: int, peak_flops: float, causal: bool = True) -> float:
    """Model FLOPs utilisation, 0 to 1: the FLOP/s that training needs over the GPU's nominal dense ``peak_flops`` (FLOP/s).

    Say which convention a number uses: ``causal=True`` (this project's) counts attention once, ``causal=False`` (PaLM's) twice, which at
    Qwen2.5-1.5B and 2,048 tokens reads 5% higher for the same speed.
    """
    return tokens_per_second_per_gpu * flops_per_token(shape, sequence_length, causal) / peak_flops
