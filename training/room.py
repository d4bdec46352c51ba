"""Whether a micro-batch fits the GPU, tried before the first step and remembered in the run's folder."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from training import loop
from training.data import MicroBatch, Step
from training.errors import BadInput, StartAgain
from training.loss import IGNORE
from training.optimizer import AdamW
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


def check(net: Any, optimizer: AdamW, settings: Settings, world: World, folder: Place, *, size: int, length: int, rows: int, reshard: bool) -> None:
    """Tries ``size`` rows of ``length`` tokens with everything that a step holds; a collective.

    That is: gradients of an earlier micro-batch, if ``rows`` of a step make several, and AdamW's two moments. What does not fit is written
    to ``folder``. Nothing smaller is tried in place: FSDP and other workers' collectives are left half-way by the failure. Raises BadInput
    for a size that a person has set, else StartAgain, on all ranks.
    """

    def work() -> None:
        try:
            _one_step(net, optimizer, settings, world, size, length, several=size * world.size < rows, reshard=reshard)
        except torch.OutOfMemoryError as error:
            said = f"{size} rows of {length} tokens (microBatch) do not fit the GPU's memory; this was tried before the first step"
            if settings.micro_batch is not None:
                raise BadInput(f"{said}. Leave microBatch out, lower it, or set activationCheckpointing to full") from error
            (folder / FILE).write_json({"rows": size, "length": length, "workers": world.size})
            raise StartAgain(f"{said}. The next start takes fewer") from error

    world.together(work)
    net.zero_grad(set_to_none=True)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)


def missing_moments(net: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Room for AdamW's two moments of this rank's shards, but for those that a resumed run has already."""
    return [torch.empty_like(p.to_local()) for p in net.parameters() if not optimizer.state.get(p) for _ in range(2)]


def _one_step(net: Any, optimizer: AdamW, settings: Settings, world: World, size: int, length: int, *, several: bool, reshard: bool) -> None:
    moments = missing_moments(net, optimizer)
    tokens = torch.zeros(size, length, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE)
    labels[:, 0] = 0
    micro = MicroBatch(tokens, labels, torch.arange(length).expand(size, length) if settings.document_mask else None)
    step = Step(0, [micro] * (2 if several else 1), size, 0.0)
    loop.forward_backward(net, step, settings, world, reshard)
    optimizer.gradient_norm()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    del moments
