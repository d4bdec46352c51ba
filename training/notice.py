"""Word from outside that this run's processes are about to end: all ranks ask for it at the same steps, and answer with a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.world import World

# Asking must cost less than a thousandth of the time it is done in, and must still be done well within the shortest grace time (25 s).
SHARE = 1e-3
LEAST_SECONDS, MOST_SECONDS = 1.0, 8.0
# Between the last checkpoint's end and the deadline, for clocks that differ and a store that has become slower.
SPARE_SECONDS = 3.0
# torchrun hands a SIGTERM on that its workers may have had already, from whoever sent it to the whole group.
SAME_SIGNAL_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Notice:
    """``outcome`` is what the record calls an attempt that ends by it; ``reason`` says why, in words that begin a sentence.

    ``deadline``: when the processes are taken away, in seconds since the epoch; None: as soon as the checkpoint is there.
    """

    outcome: str
    reason: str
    deadline: float | None = None


def spare(save_seconds: float, step_seconds: float) -> float:
    """Seconds before a deadline at which the last checkpoint must begin: it may take twice as long as the first one, and a step is in between."""
    return SPARE_SECONDS + 2 * save_seconds + 2 * step_seconds


def steps_until_next(interval: float, step_seconds: float) -> int:
    """How many steps from now to ask again, so that ``interval`` seconds have passed: 1 where a step alone takes them."""
    return max(1, math.ceil(interval / max(step_seconds, 1e-6)))


class Watch:
    """Asks whether the run is about to be stopped, by rank 0's clock, and says when a checkpoint is due because of it.

    ``ask`` is called on all ranks at the same steps; it may be a collective. What one rank was told, all are.
    """

    def __init__(self, world: World, ask: Callable[[], Notice | None], start_step: int) -> None:
        self._world, self._ask = world, ask
        self._next, self._step = start_step + 1, start_step
        self._time = time.monotonic()
        self._interval, self.step_seconds = LEAST_SECONDS, 0.0
        self._answered: Notice | None = None
        self._save_seconds, self._not_before = 0.0, 0.0
        self._is_last = False

    def look(self, done: int) -> Notice | None:
        """After ``done`` steps: the notice for which a checkpoint must be written now, None where none must. A collective."""
        if done < self._next:
            return None
        began = time.monotonic()
        step_seconds = (began - self._time) / max(1, done - self._step)
        said = self._world.gather((self._ask(), time.time(), step_seconds, steps_until_next(self._interval, step_seconds)))
        self._interval = min(MOST_SECONDS, max(LEAST_SECONDS, (time.monotonic() - began) / SHARE))
        self._time, self._step = time.monotonic(), done
        notice = next((found for found, *_ in said if found is not None), None)
        _, clock, self.step_seconds, steps = said[0]
        self._next = done + (1 if notice is not None else steps)
        if notice is None:
            self._answered = None
            return None
        if self._answered is None or notice.outcome != self._answered.outcome:
            self._answered, self._is_last = notice, notice.deadline is None
            return notice
        if self._is_last or notice.deadline is None:
            return None
        due = max(notice.deadline - spare(self._save_seconds, self.step_seconds), self._not_before)
        if not due <= clock < notice.deadline - self._save_seconds:
            return None
        self._is_last = True
        return notice

    def saved(self, seconds: float) -> None:
        """Told on all ranks alike that the checkpoint was written in ``seconds``: where the deadline is far, another one is due near it."""
        self._save_seconds = seconds
        self._not_before = self._world.broadcast(time.time()) + max(SPARE_SECONDS, 2 * seconds)  # sooner, it would save little


@contextlib.contextmanager
def terminated() -> Iterator[Callable[[], Notice | None]]:
    """Within the block a SIGTERM ends the run after a checkpoint, and a second one at once. Yields what :class:`Watch` asks.

    Elsewhere than in the main thread Python takes no signals, and nothing is ever told.
    """
    told: list[float] = []
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def on_signal(number: int, _frame: object) -> None:
        if told and time.monotonic() - told[0] < SAME_SIGNAL_SECONDS:
            return
        if told or not by_torchrun:
            signal.signal(number, signal.SIG_DFL)  # by itself, so that it ends even a process that is stuck in a collective
        if told:
            os.kill(os.getpid(), number)
        told.append(time.monotonic())

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield lambda: Notice("interrupted", "SIGTERM was received") if told else None
    finally:
        signal.signal(signal.SIGTERM, before)
