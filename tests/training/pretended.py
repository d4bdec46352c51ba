"""Runs without training: after step n every weight is n, so that whatever is read back tells which step it is of. Everything else is the project's own."""

from __future__ import annotations

import dataclasses
import os
import sys
import urllib.request
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.training.tiny import Case, build
from training import checkpoint, dcp, storage
from training.storage import place
from training.world import World

S3_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}


@dataclasses.dataclass(frozen=True)
class Run:
    folder: str
    steps: int = 6
    every: int = 2
    patience: float = 60.0
    asynchronous: bool = False
    attempt: int = 1
    keep: int = 2
    block: int = dcp.BLOCK
    client: tuple[float, float, int] = (1.0, 3.0, 1)
    """Limits of S3's client (storage.PATIENT); one try, so that what is tested is what lies above it."""
    tell: str | None = None
    """A URL that rank 0 asks for before the last step."""


def prepare(run: Run) -> None:
    os.environ.update(S3_ENVIRONMENT)
    storage.PATIENT = run.client
    storage.FIRST_PAUSE = checkpoint.FIRST_PAUSE = 0.02
    dcp.BLOCK = checkpoint.BLOCK = run.block


def fill(net: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Weights and AdamW's moments, all ``step``."""
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(step)
            for moment in _moments(optimizer, p):
                moment.fill_(step)


def values(net: Any, optimizer: torch.optim.Optimizer) -> set[float]:
    """All values that this rank's weights and moments have."""
    parts = [t.detach() for p in net.parameters() for t in (p, *_moments(optimizer, p))]
    return {float(v) for part in parts for v in (part.to_local() if isinstance(part, DTensor) else part).unique()}


def _moments(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> list[torch.Tensor]:
    return [optimizer.state.get(p, {})[name] for name in ("exp_avg", "exp_avg_sq") if name in optimizer.state.get(p, {})]


def go(world: World, run: Run) -> dict[str, Any]:
    """Goes on from the newest checkpoint to ``run.steps``, and reads the last one back. Returns what happened."""
    prepare(run)
    _, net, optimizer = build(world, Case())
    said: list[str] = []
    folder = place(run.folder) / "checkpoints"
    found = checkpoint.latest(folder, world, said.append, run.patience)
    checkpoints = checkpoint.Checkpointer(folder, world, run.attempt, run.keep, run.asynchronous, run.patience, said.append)
    found = checkpoints.load_newest(found, net, optimizer)
    start = found.step if found else 0
    checkpoint._state(net, optimizer, world)  # makes AdamW's moments
    if found:
        assert values(net, optimizer) == {float(start)}, f"step {start} must come back whole"
    begun = []
    for step in range(start + 1, run.steps + 1):
        fill(net, optimizer, step)
        if step == run.steps and run.tell and world.is_main:
            urllib.request.urlopen(run.tell).read()
        if step == run.steps or checkpoints.is_due(step % run.every == 0):
            begun.append(step)
            checkpoints.save(step, net, optimizer, {})
    checkpoints.finish(net, optimizer)
    final = checkpoint.latest(folder, world, said.append, run.patience)
    assert final is not None, "the last checkpoint must be there"
    fill(net, optimizer, -1)
    checkpoints.load(final, net, optimizer)
    return {"start": start, "begun": begun, "said": said, "final": final.step, "values": values(net, optimizer)}


def go_watched(world: World, run: Run, events: Connection) -> dict[str, Any]:
    """As :func:`go`, with ``events`` told of all that is done to the run's files."""
    listened(run.folder, events)
    return go(world, run)


def listened(folder: str, events: Connection) -> None:
    """From now on a byte goes through ``events`` before whatever this process does to a file under ``folder``,
    and with every 64 KiB that it writes to a checkpoint."""
    tell = events.fileno()

    def heard(name: str, arguments: tuple[Any, ...]) -> None:
        if name in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(arguments[0]).startswith(folder):
            os.write(tell, b".")

    sys.addaudithook(heard)
    put = dcp._Stream._put

    def heard_put(stream: Any, view: memoryview) -> None:
        if stream.at == 0 or stream.at % 65536 + len(view) >= 65536:
            os.write(tell, b".")
        put(stream, view)

    dcp._Stream._put = heard_put  # type: ignore[method-assign]
