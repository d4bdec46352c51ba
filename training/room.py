"""Whether a micro-batch fits the GPU, tried before the first step and remembered in the run's folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from training import loop
from training.data import MicroBatch, Step
from training.errors import BadInput, TrainingFailed
from training.loss import IGNORE
from training.settings import Settings
from training.storage import Place
from training.world import World

FILE = "micro-batch-too-large.json"


def too_large(folder: Place) -> int | None:
    """The smallest micro-batch (rows) that an earlier start of this run found not to fit; None: none was."""
    with contextlib.suppress(FileNotFoundError):
        found = (folder / FILE).read_json()
        if isinstance(found, dict) and isinstance(found.get("rows"), int):
            return int(found["rows"])
    return None


def largest_that_fits(sizes: Sequence[int], attempt: Callable[[int], None]) -> int | None:
    """The first of ``sizes`` for which ``attempt`` raises no OutOfMemoryError; None: none. The largest comes first."""
    for size in sizes:
        try:
            attempt(size)
        except torch.OutOfMemoryError:
            continue
        return size
    return None


def find(net: Any, settings: Settings, world: World, folder: Place, *, sizes: Sequence[int], length: int, rows: int, reshard: bool) -> int:
    """The first of ``sizes`` (rows of ``length`` tokens, the planned one first) that fits; a collective.

    Each is tried with everything that a step holds: gradients of an earlier micro-batch, if ``rows`` of a step make several, and AdamW's
    two moments. With several workers nothing smaller can be tried in place, as the others' collectives would never end: what did
    not fit is written down, and the next start (Ray's restart, or a person's) takes the next smaller. Raises BadInput for a size that a
    person has set, TrainingFailed where nothing fits, RuntimeError where a restart will help.
    """

    def attempt(size: int) -> None:
        try:
            _one_step(net, settings, world, size, length, several=size * world.size < rows, reshard=reshard)
        except torch.OutOfMemoryError:
            (folder / FILE).write_json({"rows": size, "length": length, "workers": world.size})
            raise

    def work() -> int:
        alone = world.size == 1
        found = largest_that_fits(sizes if alone else sizes[:1], attempt)
        if found is not None:
            return found
        said = f"{sizes[0]} rows of {length} tokens (microBatch) do not fit the GPU's memory; this was tried before the first step"
        if settings.micro_batch is not None:
            raise BadInput(f"{said}. Leave microBatch out, lower it, or set activationCheckpointing to full")
        if alone or len(sizes) == 1:
            raise TrainingFailed(f"{said}, and so was every smaller number. Shorten the rows, set activationCheckpointing to full, or use more or larger GPUs")
        raise RuntimeError(f"{said}. The next start takes {sizes[1]}")

    try:
        return world.together(work)
    finally:
        net.zero_grad(set_to_none=True)
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)


def _one_step(net: Any, settings: Settings, world: World, size: int, length: int, *, several: bool, reshard: bool) -> None:
    moments = [torch.empty_like(p.to_local()) for p in net.parameters() for _ in range(2)]
    tokens = torch.zeros(size, length, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE)
    labels[:, 0] = 0
    micro = MicroBatch(tokens, labels, torch.arange(length).expand(size, length) if settings.document_mask else None)
    step = Step(0, [micro] * (2 if several else 1), size, 0.0)
    loop.forward_backward(net, step, settings, world, reshard)
    loop.clip(net, settings.grad_clip)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    del moments
