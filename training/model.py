"""A causal language model of Hugging Face transformers: built empty, sharded, then filled once from rank 0."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pyarrow.fs as pafs
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.initialization import no_init_weights

from training.errors import BadInput, first_line
from training.loss import add_token_loss
from training.settings import ModelSettings
from training.sizes import NAMED_SIZES
from training.storage import place, redacted
from training.world import World

# Files beside the weights are smaller than this, weights larger: what only needs the former must not fetch gigabytes.
_WEIGHTS_BYTES = 64 * 2**20


@contextlib.contextmanager
def pretrained_source(source: str, weights: bool) -> Iterator[str]:
    """``source`` as something that from_pretrained takes: a hub id as it is, a folder, or a local copy of what a URI holds.

    The copy has no large file unless ``weights``. Raises BadInput where a folder or URI holds no model.
    """
    folder = source.startswith((".", "/", "~")) or Path(source).exists()
    if "://" not in source and not folder:
        yield source
        return
    where = place(source)
    if not (where / "config.json").exists():
        raise BadInput(f"model.pretrained = {redacted(source)}: no config.json there; give the folder of a model in Hugging Face format, or a hub id")
    if where.local:
        yield where.path
        return
    with tempfile.TemporaryDirectory() as scratch:
        for item in where.children():
            if item.is_file and (weights or item.size < _WEIGHTS_BYTES):
                pafs.copy_files(item.path, f"{scratch}/{item.base_name}", source_filesystem=where.fs)
        yield scratch


def load_config(settings: ModelSettings, vocab_size: int) -> PretrainedConfig:
    """The model's configuration. A random model takes ``vocab_size`` (of the data's tokenizer) unless it names its own."""
    if settings.pretrained is not None:
        with pretrained_source(settings.pretrained, weights=False) as source:
            try:
                return cast(PretrainedConfig, AutoConfig.from_pretrained(source))
            except (OSError, ValueError) as error:
                raise BadInput(f"model.pretrained = {redacted(settings.pretrained)}: {first_line(error)}; give a hub id, a folder or an s3:// URI") from error
    if isinstance(settings.random, str):
        if settings.random not in NAMED_SIZES:
            raise BadInput(f"model.random = {settings.random}: no such size; known: {', '.join(NAMED_SIZES)}")
        raw: dict[str, Any] = {**NAMED_SIZES[settings.random], "vocab_size": vocab_size}
    else:
        raw = {"vocab_size": vocab_size, **(settings.random or {})}
    model_type = raw.pop("model_type", None)
    if model_type is None:
        raise BadInput("model.random needs model_type, for example qwen2")
    try:
        return AutoConfig.for_model(model_type, **raw)
    except Exception as error:  # transformers and huggingface_hub raise classes of their own, per key, for a bad value
        raise BadInput(f"model.random: {first_line(error)}") from error


def load_generation_config(settings: ModelSettings) -> GenerationConfig | None:
    """How the pretrained model's makers want it to write (its generation_config.json); None where there is none."""
    if settings.pretrained is None:
        return None
    with pretrained_source(settings.pretrained, weights=False) as source:
        try:
            return GenerationConfig.from_pretrained(source)
        except (OSError, ValueError):  # a model need not have one
            return None


def check_config(config: PretrainedConfig, *, vocab_size: int, sequence_length: int) -> None:
    """Refuses a model that can't read the data: too small a vocabulary, or rows longer than its limit. Raises BadInput."""
    problems = []
    if vocab_size > config.vocab_size:
        problems.append(
            f"the data has {vocab_size} different tokens and the model {config.vocab_size}: they were made for different tokenizers;"
            " prepare the data with the model's tokenizer"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and sequence_length > limit:
        problems.append(
            f"rows of {sequence_length} tokens exceed the model's limit of {limit} (max_position_embeddings); prepare the data with a shorter sequenceLength"
        )
    if problems:
        raise BadInput("; ".join(problems))


def build_empty(config: PretrainedConfig) -> Any:
    """The model without memory for its weights, float32, with ``token_loss``; on every rank alike."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.train()
    model.config.use_cache = False
    add_token_loss(model)
    return model


def allocate(model: Any, device: torch.device) -> None:
    """Memory for this rank's shards, and the buffers that no checkpoint holds (rotary frequencies)."""
    model.to_empty(device=device)
    with torch.no_grad():
        for module in model.modules():
            if next(module.buffers(recurse=False), None) is not None:
                model._init_weights(module)  # transformers' own rule; to_empty has left garbage in them


def full_weights(settings: ModelSettings, config: PretrainedConfig, seed: int) -> Mapping[str, Tensor]:
    """All weights in float32 on the CPU: read, or drawn with ``seed``. For rank 0 only, so that they are read once in all."""
    if settings.pretrained is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with no_init_weights():  # else PyTorch's modules draw theirs first, a third of the time
                drawn: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
            drawn.init_weights()
            return dict(drawn.state_dict())
    with pretrained_source(settings.pretrained, weights=True) as source:
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.float32, output_loading_info=True)
            model, report = loaded
        except (OSError, ValueError, RuntimeError) as error:
            raise BadInput(f"model.pretrained = {redacted(settings.pretrained)}: {first_line(error)}") from error
        if report["missing_keys"] or report["mismatched_keys"]:
            names = sorted(str(key) for key in [*report["missing_keys"], *report["mismatched_keys"]])
            raise BadInput(
                f"model.pretrained = {redacted(settings.pretrained)}: {len(names)} weights are missing or of another shape ({names[0]}, ...);"
                " the files are not whole, fetch them again"
            )
        return dict(model.state_dict())


def fill(model: Any, weights: Mapping[str, Tensor] | None, world: World) -> None:
    """Copies ``weights`` (given on rank 0, None elsewhere) into the sharded model, one tensor at a time.

    A collective: each rank receives only its own shard, and no rank but 0 ever holds the whole model.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if weights is not None:
                whole = weights[name].to(device=world.device, dtype=torch.float32)
            else:
                whole = torch.empty(parameter.shape, dtype=torch.float32, device=world.device)
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


def check_master_weights(model: Any) -> None:
    """Asserts that what the optimizer will hold is float32: bf16 weights at a learning rate of 1e-5 lose most updates, silently."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}, not float32"
