"""Random weights: the model's own rule, and nothing that was left in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from training import model
from training.settings import ModelSettings
from training.sizes import NAMED_SIZES


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that is asked for and not written holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_random_weights_are_drawn_by_the_models_own_rule(model_type: str, tied: bool) -> None:
    settings = ModelSettings(random={**NAMED_SIZES["small"], "model_type": model_type, "tie_word_embeddings": tied})
    config = model.load_config(settings, 512)
    weights = model.full_weights(settings, config, seed=3)
    for name, weight in weights.items():
        assert weight.isfinite().all(), f"{name} holds what was in memory"
        if weight.ndim > 1:
            assert weight.std().item() == pytest.approx(config.initializer_range, rel=0.05), name
        else:
            assert (weight == (1.0 if "norm" in name else 0.0)).all(), name
    one = weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    assert one == tied
    again, other = (model.full_weights(settings, config, seed) for seed in (3, 4))
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert not torch.equal(weights["lm_head.weight"], other["lm_head.weight"])
