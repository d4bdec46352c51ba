"""Finds a run that hangs, says which rank the others wait for, leaves every rank's stacks, and ends the processes.

A rank that hangs can't end by itself: it waits in a collective, deep in C++. So each rank has a thread that knows when the last optimizer step
ended. The ranks tell each other where they are through the process group's key-value store, which needs no collective and which a stuck rank
can still reach. A rank that is silent there as well was stopped (or its host was), and is named by the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from training.errors import EXIT_TRAINING_FAILED
from training.storage import Place
from training.world import World

RECENT_STEPS = 50
BETWEEN_LOOKS = 1.0
# Ranks that are read each look, for one rank that reads them; of more, all are read less often.
READ_AT_ONCE = 32
# Looks in which a rank that lives must have been heard of anew.
SILENT_LOOKS = 6
# A store that answers nothing for so long is stopped, and with it the rank that holds it. In seconds, as are the next two.
STORE_PATIENCE = 15.0
STACKS_PATIENCE = 20.0
TELLING_PATIENCE = 60.0
DATA, STEP, BETWEEN, OVER = "waiting for data", "computing", "between two steps", "at its end"


@dataclasses.dataclass(frozen=True)
class Seen:
    """What is known of a rank: where it runs, optimizer steps done, what it does, and collectives it has begun (None: not asked for yet).

    ``beat`` grows while its process runs. ``overdue``: it has waited too long for a step; never while it evaluates or saves. ``stacks``, ``told``:
    how far it is with its end.
    """

    host: str
    pid: int
    done: int
    doing: str
    overdue: bool
    beat: int
    collectives: int | None = None
    stacks: bool = False
    told: bool = False


def limit(step_seconds: Sequence[float], factor: float, floor: float) -> float | None:
    """Seconds without a step that are a hang. None: nothing is known of this run's steps yet, and the first one compiles."""
    return max(floor, factor * statistics.median(step_seconds)) if step_seconds else None


def silent_ranks(before: Mapping[int, Seen], after: Mapping[int, Seen]) -> list[int]:
    """Ranks that were not heard of between two looks."""
    return [rank for rank, seen in after.items() if rank in before and seen.beat == before[rank].beat]


def hangs(before: Mapping[int, Seen], after: Mapping[int, Seen]) -> bool:
    """Whether every rank that lives waits too long. One that does not may be writing a checkpoint, for which the others have to wait."""
    silent = silent_ranks(before, after)
    return all(seen.overdue for rank, seen in after.items() if rank not in silent)


def sentence(seen: Mapping[int, Seen], silent: Sequence[int], seconds: float, stacks: str) -> str:
    """What a person is told of a hang: the rank that is late, where, and where the others are.

    Late is who is silent; if nobody is, who has done fewer steps; then, who has begun fewer collectives.
    """
    loud = {rank: one for rank, one in seen.items() if rank not in silent}
    late = [rank for rank in silent if rank in seen]
    if not late and loud:
        where_is = {rank: (one.done, one.collectives or 0) for rank, one in loud.items()}
        if len(set(where_is.values())) > 1:
            late = [rank for rank, at in where_is.items() if at == min(where_is.values())]
    others = [one for rank, one in seen.items() if rank not in late]
    waiting = max((one.done for one in others), default=0) + 1
    end = f"; no step has ended for {seconds:.0f} s (stacks in {stacks})"
    if len(seen) == 1 and not late:
        return f"the run hangs: it is {others[0].doing} at step {waiting}{end}"
    if not late:
        return f"the run hangs: all {len(seen)} ranks wait in step {waiting}, and none is behind{end}"
    names = ", ".join(f"rank {rank} on host {seen[rank].host}" for rank in late[:3]) + (f" and {len(late) - 3} more" if len(late) > 3 else "")
    one, first = len(late) == 1, seen[late[0]]
    if not silent:
        where = f"{'it is' if one else 'they are'} {first.doing} at step {first.done + 1}"
    elif first.doing.startswith(OVER):
        where = f"{'it has' if one else 'they have'} left the training after step {first.done}{first.doing.removeprefix(OVER)}"
    else:
        where = f"{'it has' if one else 'they have'} not answered since step {first.done} (stopped, or the host is lost)"
    rest = f", while the others wait in step {waiting}" if others else ""
    return f"{names} {'is' if one else 'are'} late: {where}{rest}{end}"


class Idle:
    """What the loop tells of itself; this one listens to nothing."""

    doing = STEP
    """What the main thread does, for a person."""
    paused: str | None = None

    def ended(self, done: int) -> None:
        """An optimizer step ended (on a GPU: was queued), and ``done`` of them by now."""

    def pausing(self, what: str | None) -> None:
        """From here on (an evaluation, a checkpoint) no step is awaited, on no rank; None: from here on it is again."""

    @contextlib.contextmanager
    def pause(self, what: str) -> Iterator[None]:
        """:meth:`pausing` for the block."""
        before = self.paused
        self.pausing(what)
        try:
            yield
        finally:
            self.pausing(before)

    def close(self, error: BaseException | None = None) -> None:
        """Ends the watch; because of ``error``, if it is given."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(error)


class Watchdog(Idle):
    """Watches this rank from its own threads until it is closed. Made and closed by all ranks together.

    factor, floor: as :func:`limit`. ``tell(sentence, steps done)`` is called on one rank, rank 0 unless that is the late one, and then all processes
    end with exit code 3. ``folder`` is the run's; stacks go to ``hang/attempt-N/`` in it.
    """

    def __init__(self, world: World, folder: Place, attempt: int, done: int, factor: float, floor: float, tell: Callable[[str, int], None]) -> None:
        self.world, self.folder, self.factor, self.floor, self.tell = world, folder / "hang" / f"attempt-{attempt}", factor, floor, tell
        self.look = min(BETWEEN_LOOKS, floor / 10)
        prefix = f"watch/{world.broadcast(time.time_ns())}"
        self._keys, self._flag_key = [f"{prefix}/{rank}" for rank in range(world.size)], f"{prefix}/hang"
        self._store = _own_connection() if world.size > 1 else None
        self._done, self._at = done, time.monotonic()
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._queued: deque[tuple[int, torch.cuda.Event]] = deque()
        self._last_event: torch.cuda.Event | None = None
        self._began: float | None = None  # of the step that runs; None: it can't be timed, for something else was done meanwhile
        self._beat = 0
        self._collectives: int | None = None
        self._stacks = self._told = False
        self._table: dict[int, Seen] = {world.rank: self._self()}
        self._flag: str | None = None
        self._raise: str | None = None
        self._heard = time.monotonic()
        self._late_since: float | None = None
        self._over, self._ending, self._lock = threading.Event(), threading.Event(), threading.Lock()
        works: dict[str, Callable[[], None]] = {"judge": self._judge}
        if self._store is not None:
            works["mail"] = self._mail
        if world.device.type == "cuda":
            works["count"] = self._count
        self._threads = [threading.Thread(target=work, name=f"watchdog-{name}", daemon=True) for name, work in works.items()]
        for thread in self._threads:
            thread.start()

    # ---- what the main thread tells; no lock and no system call, for it is told each step

    def ended(self, done: int) -> None:
        if self.world.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._queued.append((done, event))
            return
        at = time.monotonic()
        if self._began is not None:
            self._seconds.append(at - self._began)
        self._done, self._at, self._began = done, at, at

    def pausing(self, what: str | None) -> None:
        self.paused, self._at = what, time.monotonic()
        self._began = self._at if self._began is not None else None

    def close(self, error: BaseException | None = None) -> None:
        """Ends the watch, and returns. Where the process is being ended already, it waits for that: the error that brings the main thread here is
        only that other ranks have ended."""
        with self._lock:
            if not self._ending.is_set():
                self.doing = f"{OVER} ({type(error).__name__}: {error})" if error else OVER
                self._over.set()
        if self._over.is_set():
            # A thread that comes back from c10d to an interpreter that has ended brings the process down with SIGABRT. None is in the store for
            # longer than this, unless that is stopped.
            deadline = time.monotonic() + STORE_PATIENCE
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            return
        time.sleep(2 * STACKS_PATIENCE + 2 * TELLING_PATIENCE)

    # ---- the thread that judges

    def _judge(self) -> None:
        before: dict[int, Seen] | None = None
        while not self._over.wait(self.look):
            now = time.monotonic()
            if self._flag is not None and len(self._table) == self.world.size:
                self._end(json.loads(self._flag)["silent"])
            if not self._is_overdue():
                before, self._late_since = None, None
                continue
            self._late_since = self._late_since or now
            if self._store is None:
                self._end([])
            elif now - max(self._heard, self._late_since) > STORE_PATIENCE:
                self._end([0] if self.world.rank else [])  # who holds the store
            elif len(self._table) == self.world.size:
                after = self._table
                # By its own beats a rank knows how old what it has read is; where the store is slow, nobody is silent for that.
                if before is None or after[self.world.rank].beat - before[self.world.rank].beat >= SILENT_LOOKS:
                    if before is not None and hangs(before, after):
                        self._raise = json.dumps({"silent": silent_ranks(before, after)})
                    before = after

    # ---- the thread that asks the GPU; of its own, for CUDA lets it wait while the main thread is held in a copy from a GPU that hangs

    def _count(self) -> None:
        """Notes what the GPU has finished meanwhile."""
        while not self._over.wait(self.look):
            while self._queued and self._note(*self._queued[0]):
                self._queued.popleft()

    def _note(self, done: int, event: torch.cuda.Event) -> bool:
        """Whether the step's end is reached; then it counts."""
        try:
            if not event.query():  # type: ignore[no-untyped-call]
                return False
            if self._last_event is not None:
                self._seconds.append(self._last_event.elapsed_time(event) / 1e3)
        except RuntimeError:
            return False  # the GPU failed: the main thread will hear of it too
        self._done, self._at, self._last_event = done, time.monotonic(), event
        return True

    def _is_overdue(self) -> bool:
        most = limit(self._seconds, self.factor, self.floor)
        return most is not None and self.paused is None and time.monotonic() - self._at > most

    def _self(self) -> Seen:
        return Seen(
            socket.gethostname(),
            os.getpid(),
            self._done,
            self.paused or self.doing,
            self._is_overdue(),
            self._beat,
            self._collectives,
            self._stacks,
            self._told,
        )

    # ---- the thread that exchanges with the others: a stopped store blocks it for good, whatever time-out is set

    def _mail(self) -> None:
        assert self._store is not None
        last = False
        while not last:
            last = self._over.wait(self.look)  # once more, so that the others know
            try:
                self._beat += 1
                self._store.set(self._keys[self.world.rank], json.dumps(dataclasses.asdict(self._self())))
                if self._raise is not None:
                    self._store.set(self._flag_key, self._raise)
                if self._flag is None and self._store.check([self._flag_key]):
                    self._flag = self._store.get(self._flag_key).decode()
                # In peace too: of a rank that takes the store with it, nothing can be asked afterwards.
                due = self._beat % max(1, self.world.size // READ_AT_ONCE) == 0
                wanted = due or self._late_since is not None or self._flag is not None or len(self._table) < self.world.size
                if wanted and self._store.check(self._keys):
                    self._table = {rank: Seen(**json.loads(told)) for rank, told in enumerate(self._store.multi_get(self._keys))}
                self._heard = time.monotonic()
            except RuntimeError:  # what all of c10d's errors are: who holds the store is gone, and the run with it
                continue

    # ---- the end

    def _end(self, silent: list[int]) -> None:
        """Leaves this rank's stacks, tells if it is this rank's turn, and ends the process; returns only where the watch was closed meanwhile."""
        with self._lock:
            if self._over.is_set():
                return
            self._ending.set()
        seconds = time.monotonic() - self._at
        loud = [rank for rank in range(self.world.size) if rank not in silent]
        speaker = min(loud)
        try:
            _within(STACKS_PATIENCE, lambda: self._leave_stacks(silent))
            self._stacks = True
            if self.world.rank != speaker:
                # An end before the speaker's would be an error of its own to the launcher, which would end the speaker for it.
                self._await(STACKS_PATIENCE + TELLING_PATIENCE, lambda: self._table[speaker].told)
                return
            self._await(STACKS_PATIENCE, lambda: all(self._table[rank].stacks for rank in loud if rank != speaker))
            self._table = {**self._table, speaker: self._self()}
            text = sentence(self._table, silent, seconds, str(self.folder))
            _within(TELLING_PATIENCE, lambda: self.tell(text, self._done))
            self._told = True
            time.sleep(3 * self.look if len(loud) > 1 else 0)
        finally:
            os._exit(EXIT_TRAINING_FAILED)

    def _await(self, seconds: float, reached: Callable[[], bool]) -> None:
        """Waits for what the others tell, as long as they can be heard at all."""
        deadline = time.monotonic() + seconds
        while self._store is not None and time.monotonic() < deadline and time.monotonic() - self._heard < STORE_PATIENCE and not reached():
            time.sleep(self.look / 2)

    def _leave_stacks(self, silent: Sequence[int]) -> None:
        self._collectives = _collectives()
        head = f"{_where(self.world.rank, self._self())}; {time.monotonic() - self._at:.0f} s since its last step\n\n"
        self._write(f"rank-{self.world.rank}.txt", head.encode() + _stacks(os.getpid()))
        # A stopped neighbour can't write its own; it can be read from outside.
        neighbours = [rank for rank, seen in self._table.items() if rank not in silent and seen.host == socket.gethostname()]
        if not neighbours or self.world.rank == min(neighbours):
            for rank in silent:
                seen = self._table.get(rank)
                if seen is not None and seen.host == socket.gethostname():
                    stacks = _py_spy(seen.pid)
                    if stacks:
                        self._write(f"rank-{rank}.txt", f"{_where(rank, seen)}; read by rank {self.world.rank}\n\n".encode() + stacks)
        self._write(f"collectives-{self.world.rank}", _flight_record(self.world.device.type))

    def _write(self, name: str, content: bytes) -> None:
        """A private file: stacks show paths and code."""
        target = self.folder / name
        if not target.local:
            target.write_bytes(content)
            return
        Path(self.folder.path).mkdir(parents=True, exist_ok=True)
        with open(os.open(target.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)


def _where(rank: int, seen: Seen) -> str:
    return f"rank {rank} on host {seen.host}, process {seen.pid}: {seen.done} steps done, {seen.doing}"


def _own_connection() -> Any:
    # Private, and the only way: Ray Train and torchrun make the group's store and keep it. A clone has a connection of its own, for a waiting one
    # is locked.
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def _collectives() -> int:
    """Collectives that this rank has begun, in all process groups."""
    groups: Any = dist.distributed_c10d._world.pg_names
    return sum(group._get_sequence_number_for_group() for group in groups)


def _flight_record(device_type: str) -> bytes:
    """PyTorch's record of the last collectives, pickled; that of NCCL is what ``torch.distributed.flight_recorder.fr_trace`` reads."""
    backend: Any = torch._C._distributed_c10d
    record: bytes = backend._dump_nccl_trace() if device_type == "cuda" else backend._dump_fr_trace()
    return record


def _stacks(pid: int) -> bytes:
    """The stacks of all threads of this process: py-spy's if it may, else Python's own."""
    found = _py_spy(pid)
    if found:
        return found
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _py_spy(pid: int) -> bytes | None:
    """None: there is no py-spy here, or it may not look (a container without SYS_PTRACE)."""
    program = shutil.which("py-spy", path=os.pathsep.join([os.environ.get("PATH", ""), os.path.dirname(sys.executable)]))
    if program is None:
        return None
    try:
        # Nothing that is stopped for being read could be left stopped.
        done = subprocess.run([program, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, timeout=STACKS_PATIENCE / 2)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 and b"Thread" in done.stdout else None


def _within(seconds: float, work: Callable[[], object]) -> None:
    """Runs ``work``, and goes on without it where it takes longer: a store that hangs may be the reason of all."""

    def run() -> None:
        try:
            work()
        except Exception as error:  # the process ends in any case, and this is the last that can be said
            print(f"watchdog: {type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201

    thread = threading.Thread(target=run, name="watchdog-end", daemon=True)
    thread.start()
    thread.join(seconds)
