"""A whole run on real ranks, as the fault tests start it: what it says goes to a queue, so that a test can act at a step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
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
    """One rank's run. Its queue in ``said`` gets its process id first, then what it tells a person."""
    said[world.rank].put(os.getpid())
    if prepare is not None:
        prepare(world)
    return worker.run_rank(schema.parse(Settings, settings), world, worker.Hooks(said[world.rank].put))


class Group:
    """Ranks that run; ``pids`` by rank."""

    def __init__(self, size: int, settings: dict[str, Any], prepare: Callable[[World], None] | None = None) -> None:
        # One each, without a thread: a stopped rank may hold a lock, and one that ends at once would take with it what is not written yet.
        self.said = [ranks._context.SimpleQueue() for _ in range(size)]
        self.lines: list[str] = []
        self.processes, self.answers = ranks.start_ranks(size, rank, settings, self.said, prepare)
        assert all(queue._reader.poll(120) for queue in self.said), "every rank must start"  # type: ignore[attr-defined]
        self.pids = [queue.get() for queue in self.said]

    def until(self, part: str) -> str:
        """The next thing said that holds ``part``."""
        readers = {queue._reader: queue for queue in self.said}
        while True:
            for ready in wait(list(readers), timeout=5):
                line = readers[ready].get()  # type: ignore[index]
                self.lines.append(line)
                if part in line:
                    return line
            assert any(process.is_alive() for process in self.processes), f"nothing with {part!r} was said: {self.lines}"

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
            process.kill()
            process.join(timeout=60)
