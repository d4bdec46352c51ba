"""A step's forward and backward pass as one CUDA graph, where a GPU is through with a micro-batch before its host has launched it.

The graph is what the loop does otherwise, recorded once: same kernels, same weights, same memory for the gradients. Only its inputs are copied to where
it was recorded with them, and nothing of Python is run again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from training import loop
from training.data import MicroBatch, Step
from training.errors import StartAgain, first_line
from training.settings import Settings
from training.storage import Place
from training.world import World

FILE = "no-cuda-graph.json"


def failed_before(folder: Place) -> bool:
    """Whether an earlier start of this run could not record its step."""
    return (folder / FILE).exists()


class Replay:
    """As :func:`training.loop.forward_backward`, for one worker and steps of one micro-batch. The first step is run; then it is recorded.

    It holds for weights that stay where they are: whoever loads others makes a new one.
    """

    def __init__(self, model: Any, settings: Settings, world: World, folder: Place, say: Callable[[str], None]) -> None:
        self.model, self.settings, self.world, self.folder, self.say = model, settings, world, folder, say
        self._parameters = list(model.parameters())
        self._steps = self._passing = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Step) -> Tensor:
        """Gradients of the mean loss, which is returned. Raises StartAgain where the step can't be recorded."""
        self._steps += 1
        if self._steps == 2 and self._fits():
            self._record(batch)
        if self._graph is None:
            held = torch.cuda.memory_allocated(self.world.device)
            loss = loop.forward_backward(self.model, batch, self.settings, self.world, reshard=False)
            self._passing = torch.cuda.max_memory_allocated(self.world.device) - held
            return loss
        ids, labels, _ = batch.micro_batches[0]
        self._ids.copy_(ids, non_blocking=True)
        self._labels.copy_(labels, non_blocking=True)
        self._valid.fill_(max(batch.valid_tokens, 1))
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def _fits(self) -> bool:
        """Whether the GPU has room to keep what the first step held for its time, and once more for an evaluation beside it."""
        device = self.world.device
        gc.collect()
        torch.cuda.empty_cache()
        (free, total), share = torch.cuda.mem_get_info(device), torch.cuda.get_per_process_memory_fraction(device)
        free, wanted = min(free, int(share * total) - torch.cuda.memory_allocated(device)), 2 * self._passing
        if wanted <= free:
            return True
        self.say(f"steps are not replayed as a CUDA graph, and wait for the host: that takes {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} are free")
        return False

    def _record(self, batch: Step) -> None:
        ids, labels, positions = batch.micro_batches[0]
        assert len(batch.micro_batches) == 1, "a step of one micro-batch"
        assert positions is None, "fast blocks take none"
        device = self.world.device
        self._ids, self._labels = torch.empty_like(ids, device=device), torch.empty_like(labels, device=device)
        self._valid = torch.ones((), device=device)
        recorded = MicroBatch(self._ids, self._labels, None)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads (data, checkpoints, the watchdog) go on with what they do on the GPU.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._loss = loop.gradients(self.model, [recorded], self._valid, self.settings, self.world, reshard=False)
        except RuntimeError as error:  # FSDP is left half-way: only a new start can do without
            why = first_line(error)
            (self.folder / FILE).write_json({"why": why})
            raise StartAgain(f"the step could not be recorded as a CUDA graph ({why}). The next start does without") from error
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._graph = graph
