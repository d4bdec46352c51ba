"""The trained model as a Hugging Face folder: safetensors in bf16, configuration, generation defaults, tokenizer."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig

from training.errors import TrainingFailed
from training.storage import Place, patiently
from training.world import World


def export(
    model: Any,
    tokenizer: Place,
    target: Place,
    world: World,
    *,
    eos_token_id: int,
    generation: GenerationConfig | None = None,
    shard_bytes: int = 4 * 2**30,
    patience: float = 0.0,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Writes ``target`` (a run's ``model/``) so that ``from_pretrained`` loads it. A collective; rank 0 writes.

    Weights are gathered one tensor at a time and written once ``shard_bytes`` of them are together: no host holds the model a
    second time. A weight that is tied is written once, under the name that transformers looks for. What was at ``target``
    is replaced only when the new one is whole (in an object store: file by file, after it is whole here), and a store that refuses it is asked
    again for ``patience`` seconds. Raises TrainingFailed on all ranks when it can't be written.
    """
    parameters = dict(model.named_parameters())  # a tied weight comes once, under its first name
    shapes = {name: torch.empty(p.shape, dtype=torch.bfloat16, device="meta") for name, p in parameters.items()}
    files = split_torch_state_dict_into_shards(shapes, max_shard_size=shard_bytes)
    with _scratch(target, world) as folder:
        for file, names in files.filename_to_tensors.items():
            weights = {}
            for name in names:
                whole = parameters[name].detach()
                whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
                if folder is not None:
                    weights[name] = whole.to(device="cpu", dtype=torch.bfloat16).contiguous()

            def write(file: str = file, weights: dict[str, torch.Tensor] = weights) -> None:
                assert folder is not None
                _explain(lambda: save_file(weights, folder / file, metadata={"format": "pt"}), target)

            world.on_main(write)

        def finish() -> None:
            assert folder is not None
            if files.is_sharded:
                index = {"metadata": files.metadata, "weight_map": files.tensor_to_filename}
                (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
            _write_configuration(model, tokenizer, folder, eos_token_id, generation)
            put = functools.partial(_put, folder, target)
            if target.local:
                put()
            else:
                patiently(put, patience, say, f"the model's copy to {target}")

        world.on_main(lambda: _explain(finish, target))


def _explain(work: Any, target: Place) -> None:
    try:
        work()
    except Exception as error:  # safetensors has an exception class of its own for a full disk
        raise TrainingFailed(
            f"the model could not be written to {target} ({error}); the checkpoints are untouched. Make room, then start the same command again"
        ) from error


@contextlib.contextmanager
def _scratch(target: Place, world: World) -> Iterator[Path | None]:
    """A new folder on rank 0, beside ``target`` where that is a folder, so that a rename can put it in place; None on other ranks."""
    if not world.is_main:
        yield None
        return
    beside = None
    if target.local:
        beside = Path(target.path).parent
        beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=beside, prefix=".model-") as folder:
        yield Path(folder)


def _write_configuration(model: Any, tokenizer: Place, folder: Path, eos_token_id: int, given: GenerationConfig | None) -> None:
    config = type(model.config)(**model.config.to_dict())
    config.dtype = torch.bfloat16  # transformers 5 loads in the type written here
    config.use_cache = True
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if config.eos_token_id is None:
        config.eos_token_id = eos_token_id
    config.save_pretrained(folder)
    generation = given or GenerationConfig.from_model_config(config)
    if generation.eos_token_id is None:
        generation.eos_token_id = eos_token_id
    if generation.pad_token_id is None:
        generation.pad_token_id = eos_token_id
    generation.use_cache = True
    generation.save_pretrained(folder)
    pafs.copy_files(tokenizer.path, str(folder), source_filesystem=tokenizer.fs)


def _put(folder: Path, target: Place) -> None:
    if not target.local:
        target.delete()
        pafs.copy_files(str(folder), target.path, destination_filesystem=target.fs)
        return
    whole, final = folder / ".whole", Path(target.path)
    # A folder can't be renamed onto one that is not empty: the old one steps aside first, and goes with the scratch folder.
    whole.mkdir()
    for file in list(folder.iterdir()):
        if file != whole:
            shutil.move(file, whole / file.name)
    if final.exists():
        final.rename(folder / ".old")
    whole.rename(final)
