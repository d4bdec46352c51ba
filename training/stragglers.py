"""Which rank the others wait for, and by how much.

Ranks end a step together, so a slow one does not show in its own step time but in the others' waiting. What is measured on each rank is the time in
the collectives that a step waits for: FSDP's gathers and reductions, and the two small sums at a step's ends. The data travels as long for everyone;
who waits least in them is who the others wait for. On a CPU that is a clock around the call, on each step. On a GPU it is a pair of events on the
stream, on one step a line, and read when the line stops for its numbers anyway. What hosts exchange among each other under hsdp is not in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from training.record import NOTABLE_RATIO


@dataclasses.dataclass(frozen=True)
class Shares:
    """A line's ``steps`` steps: seconds of a step, and by rank the seconds of it in collectives and in waiting for data."""

    steps: int
    step_seconds: float
    exchange: tuple[float, ...]
    data_wait: tuple[float, ...]


class Exchanges:
    """This rank's time in collectives; counts while ``on``."""

    def __init__(self, device: torch.device) -> None:
        self.on = False
        self._cuda = device.type == "cuda"
        self._seconds, self._steps = 0.0, 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def install(self, net: Any) -> None:
        """Puts the clock around the collectives of FSDP's units."""
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_AllGather(self))
                module.set_custom_reduce_scatter(_ReduceScatter(self))

    def begin(self, is_line: bool) -> None:
        """A step begins; ``is_line``: a line of metrics is made after it."""
        self.on = is_line or not self._cuda
        self._steps += self.on

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Around a collective, or what is little else."""
        if not self.on:
            yield
        elif self._cuda:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            first.record()
            yield
            last.record()
            self._events.append((first, last))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """Seconds of a step since the last call. On a GPU it waits for the steps to end."""
        if self._events:
            torch.cuda.synchronize()
            self._seconds = sum(first.elapsed_time(last) for first, last in self._events) / 1e3
        seconds = self._seconds / max(1, self._steps)
        self._seconds, self._steps = 0.0, 0
        self._events.clear()
        return seconds


class _AllGather(DefaultAllGather):
    def __init__(self, exchanges: Exchanges) -> None:
        super().__init__()
        self.exchanges = exchanges

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with self.exchanges.timed():
            return super().__call__(*arguments, **named)


class _ReduceScatter(DefaultReduceScatter):
    def __init__(self, exchanges: Exchanges) -> None:
        super().__init__()
        self.exchanges = exchanges

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        with self.exchanges.timed():
            return super().__call__(*arguments, **named)


def own_seconds(shares: Shares) -> list[float]:
    """By rank: seconds of a step in which it did not wait for a slower one."""
    least = min(shares.exchange)
    return [shares.step_seconds - (exchange - least) for exchange in shares.exchange]


class Tally:
    """All lines of a run so far, but for the first one, in which things are compiled and filled. ``hosts``: one a rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self._lines = self._steps = 0
        self._own, self._data = [0.0] * len(hosts), [0.0] * len(hosts)

    def add(self, shares: Shares) -> None:
        """Counts a line in."""
        self._lines += 1
        if self._lines == 1:
            return
        self._steps += shares.steps
        self._own = [sum_ + shares.steps * own for sum_, own in zip(self._own, own_seconds(shares), strict=True)]
        self._data = [sum_ + shares.steps * wait for sum_, wait in zip(self._data, shares.data_wait, strict=True)]

    def slowest(self) -> dict[str, Any] | None:
        """The rank that the others waited for most, for the record; None where nothing was measured or there is no other rank."""
        if not self._steps or len(self.hosts) < 2:
            return None
        own = [seconds / self._steps for seconds in self._own]
        rank = max(range(len(own)), key=own.__getitem__)
        median = statistics.median_low(own)
        return {
            "rank": rank,
            "host": self.hosts[rank],
            "ratio": round(own[rank] / median, 3) if median > 0 else 1.0,
            "ownSeconds": own[rank],
            "medianSeconds": median,
            "dataWait": self._data[rank] / self._steps,
            "steps": self._steps,
        }


def line(found: Mapping[str, Any] | None) -> str | None:
    """What a person is told of the slowest rank; None: it is not notably slower than the others."""
    if found is None or found["ratio"] <= NOTABLE_RATIO:
        return None
    data = f", {found['dataWait']:.3g} s of it waiting for data" if found["dataWait"] > 0.1 * found["ownSeconds"] else ""
    return (
        f"slowest: rank {found['rank']} on host {found['host']}, {found['ratio']:.2f} times the median rank"
        f" ({found['ownSeconds']:.3g} s a step against {found['medianSeconds']:.3g} s{data}); the others wait for it"
    )
