"""Which process this is among how many, on which device; the same view under Ray Train, torchrun and alone."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from training.errors import BadInput, JobError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class World:
    """``size`` processes, ``local_size`` of them on this host; ``hosts`` holds one name a host, in order of rank.

    ``even``: every host has as many processes as the others.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]
    device: torch.device
    even: bool = True

    @property
    def is_main(self) -> bool:
        """Whether this process writes the record and speaks to the person."""
        return self.rank == 0

    def broadcast(self, value: T) -> T:
        """Rank 0's ``value`` (anything that pickles) on every rank."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return cast(T, box[0])

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, on every rank, in order of rank."""
        box: list[Any] = [None] * self.size
        dist.all_gather_object(box, value)
        return box

    def on_main(self, work: Callable[[], T]) -> T | None:
        """As :meth:`together`, but rank 0 alone runs ``work``; the others get None."""
        return self.together(lambda: work() if self.is_main else None)

    def together(self, work: Callable[[], T]) -> T:
        """Runs ``work`` on every rank, and raises on **all** ranks what any of them raised.

        Without it, the rank that stops leaves the others waiting in their next collective until it times out.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:  # handed to every rank, and raised there
            error = raised
        errors = self.gather(None if error is None else (type(error) if isinstance(error, JobError) else RuntimeError, f"{error}", type(error).__name__))
        if error is not None and not isinstance(error, JobError):
            raise error
        for rank, found in enumerate(errors):
            if found is not None:
                kind, text, name = found
                raise kind(text) if issubclass(kind, JobError) else RuntimeError(f"rank {rank} stopped: {name}: {text}")
        return cast(T, result)


def prepare_allocator() -> None:
    """Lets PyTorch grow the GPU memory it holds piece by piece, before it holds any: fixed segments leave gaps that a tight plan has no room for.

    What the environment says of the allocator stays.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """cuda:local_rank or cpu. Raises BadInput where cuda is demanded and absent."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise BadInput("device = cuda, but this machine shows no GPU to PyTorch; set device to auto or cpu, or check the driver with nvidia-smi")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def backend(device_type: str) -> str:
    """Process-group backends: CPU tensors need one too on GPUs, for checkpoints in the background and for objects."""
    return "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"


def look_around(device: torch.device) -> World:
    """The world of an initialised process group. LOCAL_RANK and LOCAL_WORLD_SIZE are set by Ray Train and by torchrun."""
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    names: list[Any] = [None] * size
    dist.all_gather_object(names, (socket.gethostname(), local_rank))
    hosts = tuple(name for name, local in names if local == 0)
    # In order of rank, a host's processes are neighbours: its first one is its local rank 0.
    starts = [i for i, (_, local) in enumerate(names) if local == 0]
    counts = {after - first for first, after in zip(starts, [*starts[1:], size], strict=True)}
    return World(rank, size, local_rank, local_size, hosts, device, even=len(counts) == 1)


@contextlib.contextmanager
def process_group(device_wanted: str, timeout_seconds: int) -> Iterator[World]:
    """A process group for torchrun (RANK is set) or for this process alone; Ray Train makes its own."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = pick_device(device_wanted, local_rank)
    if device.type == "cuda":
        prepare_allocator()
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(backend(device.type), timeout=timeout)
    else:
        # A store in memory: no port is opened for one process.
        dist.init_process_group(backend(device.type), store=HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield look_around(device)
    finally:
        dist.destroy_process_group()
