"""A whole run on real ranks, as the fault tests start it: what it says goes to a queue, so that a test can act at a step."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.training import ranks
from training import schema, worker
from training.settings import Settings
from training.world import World


def values(data: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a small run in ``folder``/r, as a person would write them."""
    return {
        "data": str(data),
        "model": {"random": "tiny"},
        "storage": str(folder),
        "run": "r",
        "steps": 20,
        "tokensPerStep": 32 * 8,
        "learningRate": 1e-2,
        "warmupSteps": 2,
        "logEvery": 1,
        "checkpointEvery": 5,
        "evalRows": 0,
        "export": False,
        "microBatch": 2,
        **changes,
    }


def rank(world: World, settings: dict[str, Any], said: Any, prepare: Callable[[World], None] | None) -> dict[str, Any]:
    """One rank's run. ``said`` gets (rank, process id) first, then what is told a person."""
    said.put((world.rank, os.getpid()))
    if prepare is not None:
        prepare(world)
    return worker.run_rank(schema.parse(Settings, settings), world, worker.Hooks(said.put))


class Group:
    """Ranks that run; ``pids`` by rank."""

    def __init__(self, size: int, settings: dict[str, Any], prepare: Callable[[World], None] | None = None) -> None:
        self.said = ranks._context.Queue()
        self.lines: list[str] = []
        self.processes, self.answers = ranks.start_ranks(size, rank, settings, self.said, prepare)
        self.pids = {process.pid: process for process in self.processes}
        told = [self.said.get(timeout=120) for _ in range(size)]
        self.pids = dict(told)

    def until(self, part: str) -> str:
        """The next thing said that holds ``part``."""
        while True:
            try:
                line = self.said.get(timeout=5)
            except queue.Empty:
                assert any(process.is_alive() for process in self.processes), f"nothing with {part!r} was said: {self.lines}"
                continue
            self.lines.append(line)
            if part in line:
                return line

    def ended(self, rank: int) -> int:
        """The exit code of a rank's process, once it has ended."""
        self.processes[rank].join(timeout=180)
        code = self.processes[rank].exitcode
        assert code is not None, f"rank {rank} must end; said: {self.lines}"
        return code


@contextlib.contextmanager
def group(size: int, settings: dict[str, Any], prepare: Callable[[World], None] | None = None) -> Iterator[Group]:
    """Ranks that are gone after the block, stopped ones as well."""
    running = Group(size, settings, prepare)
    try:
        yield running
    finally:
        for process in running.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join(timeout=60)
