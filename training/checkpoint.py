"""Checkpoints that are whole or are not used: torch.distributed.checkpoint into a folder, and a marker file last.

``checkpoints/step-00000200.2/`` is step 200 as written by attempt 2 of the run. ``complete.json`` in it is written when all
ranks' files are, and lists them with their sizes and checksums; a folder without it, or with a file missing, short or altered, is torn
and not used. Attempts never write into each other's folders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict

from training.dcp import BLOCK, Damaged, Reader, Stager, Sums, Writer
from training.errors import TrainingFailed
from training.storage import FIRST_PAUSE, LONGEST_PAUSE, Place, patiently
from training.world import World

MARKER = "complete.json"
_NAME = re.compile(r"step-(\d{8})\.(\d+)")
# A rank waits so long for the slowest one's upload. Ranks that are gone are found at once, by their connections.
_LONGEST_UPLOAD = datetime.timedelta(hours=2)


def _name(step: int, attempt: int) -> str:
    return f"step-{step:08d}.{attempt}"


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint folder: its step (optimizer steps done), the attempt that wrote it, and why it can't be used (None: it can)."""

    step: int
    attempt: int
    folder: Place
    torn: str | None
    facts: Mapping[str, Any]


def find(folder: Place) -> list[Found]:
    """All checkpoints under ``folder`` (a run's ``checkpoints/``), the newest step first, torn ones included and marked."""
    found = []
    for child in folder.children():
        name = _NAME.fullmatch(child.base_name)
        if name and child.type == pafs.FileType.Directory:
            place = folder / child.base_name
            torn, facts = _inspect(place)
            found.append(Found(int(name[1]), int(name[2]), place, torn, facts))
    return sorted(found, key=lambda c: (c.step, c.attempt), reverse=True)


def _inspect(folder: Place) -> tuple[str | None, Mapping[str, Any]]:
    try:
        facts = (folder / MARKER).read_json()
        files: Mapping[str, int] = dict(facts["files"])
    except FileNotFoundError:
        return "it was never finished", {}
    except (ValueError, KeyError, TypeError):
        return f"its {MARKER} is damaged", {}
    sizes = {Path(info.path).name: info.size for info in folder.children()}
    for name, size in files.items():
        if sizes.get(name) != size:
            return f"{name} has {sizes.get(name, 'no')} bytes, not {size}", facts
    return None, facts


def latest(folder: Place, world: World, say: Callable[[str], None], patience: float = 0.0, damaged: Collection[str] = ()) -> Found | None:
    """The newest whole checkpoint under ``folder``, the same on every rank (a collective); says so when a newer one is torn.

    damaged: names of checkpoints that were found not to hold what was written. Storage that does not answer is asked again for ``patience`` seconds.
    """

    def choose() -> tuple[int, int, Mapping[str, Any]] | None:
        for found in find(folder):
            if found.folder.name in damaged:
                continue
            if found.torn is None:
                return found.step, found.attempt, found.facts
            say(f"checkpoint {found.folder.name} is not used: {found.torn}")
        return None

    def ask() -> tuple[int, int, Mapping[str, Any]] | None:
        try:
            return patiently(choose, patience, say, f"checkpoints in {folder}")
        except OSError as error:
            raise TrainingFailed(f"{folder}: can't be read ({error}); mend the storage, then start the same command again") from error

    chosen = world.broadcast(world.on_main(ask))
    if chosen is None:
        return None
    step, attempt, facts = chosen
    return Found(step, attempt, folder / _name(step, attempt), None, facts)


class Checkpointer:
    """Writes, prunes and loads one run's checkpoints. Its methods are collectives: every rank calls each, in the same order.

    A checkpoint that storage does not take is given up and said, training goes on, and a newer one is ``owed``: it is tried again after a
    pause that doubles, for ``patience`` seconds, and then ends the run. In the background at most one is on its way, for each holds a copy of
    the state in memory; where storage is slower than the checkpoints are frequent, the next one is begun when the one before is there.
    """

    def __init__(
        self,
        folder: Place,
        world: World,
        attempt: int,
        keep: int,
        asynchronous: bool,
        patience: float = 0.0,
        say: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.world, self.attempt, self.keep, self.asynchronous = folder, world, attempt, keep, asynchronous
        self.patience, self.say, self.clock = patience, say, clock
        # A group of its own: in the background its collectives would mix with those of training.
        self.group = dist.new_group(backend="gloo", timeout=_LONGEST_UPLOAD)
        self._stager = Stager(pin_memory=world.device.type == "cuda")
        self.pending: _Pending | None = None
        self.last_step: int | None = None
        """The step of the newest checkpoint that is known to be whole."""
        self.owed = False
        """Whether a checkpoint is missing that should be there: refused by storage, or left out while another was on its way."""
        self._refused_since: float | None = None  # by rank 0's clock, as all times here; the same on all ranks
        self._pause, self._retry_at = 0.0, 0.0
        self._begun: tuple[int, Mapping[str, Any]] = (0, {})
        self._notes: list[str] = []  # of rank 0, from the background

    def reserve(self, model: Any) -> None:
        """Begins to ask for the memory of background checkpoints: this rank's weights and AdamW's two moments. Not a collective."""
        if self.asynchronous:
            shards = [p.to_local() for p in model.parameters()]
            weights = [shard.untyped_storage().nbytes() for shard in shards]
            self._stager.reserve([*weights, *(2 * [shard.nbytes for shard in shards])])

    def close(self) -> None:
        """Gives the memory of background checkpoints back; one that is on its way keeps its own. Not a collective."""
        self._stager.close()

    def is_due(self, regular: bool) -> bool:
        """Whether :meth:`save` should be called now: ``regular`` (its step has come), or one is owed and its time has come.

        Not while another is on its way: training would stand still for as long as storage takes, and what is won is less lost work after a fault
        that most runs never have.
        """
        self.poll()
        if self.pending is not None:
            if regular and not self.owed:
                self.say(
                    f"step {self.pending.step}'s checkpoint is still on its way to {self.folder}, so the next one waits for it;"
                    " raise checkpointEvery if this is said often"
                )
            self.owed = self.owed or regular
            return False
        self.owed = self.owed or regular
        return self.owed and (self._refused_since is None or self.world.broadcast(self.clock() >= self._retry_at))

    def save(self, step: int, model: Any, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]) -> None:
        """Writes step ``step``; in the background where asynchronous, once none is on its way. ``facts`` (plain data) goes into the marker.

        Raises TrainingFailed on all ranks when this checkpoint, or the one that was on its way, can't be written and patience is at its end.
        """
        self.wait()
        self.owed, self._begun = False, (step, facts)
        folder = self.folder / _name(step, self.attempt)

        def commit(sums: Sequence[Sums]) -> None:
            own = {"step": step, "attempt": self.attempt, "worldSize": self.world.size, "device": self.world.device.type}
            sums = sorted(sums, key=lambda file: file.name)
            files = {"files": {file.name: file.size for file in sums}, "blockBytes": BLOCK, "crc32": {file.name: list(file.crc32) for file in sums}}
            (folder / MARKER).write_json({**facts, **own, **files})

        writer = Writer(folder, commit)
        state = _state(model, optimizer, self.world)
        if self.asynchronous:
            staged = self._stager.copy(state)
            self.pending = _Pending(step, writer, _in_background(lambda: self._write(step, staged, writer)), self.clock())
            return
        try:
            self._write(step, state, writer)
        except CheckpointException as error:
            self._refused(step, error)
        else:
            self._written(step)

    def _write(self, step: int, state: dict[str, Any], writer: Writer) -> None:
        """All of a checkpoint that takes storage's time. Raises CheckpointException on all ranks where any was refused."""
        try:
            state_dict_saver.save(state, storage_writer=writer, process_group=self.group)
        except CheckpointException:
            # The half-written files are of no use to anyone and may be what fills the disk.
            if self.world.is_main:
                with contextlib.suppress(OSError):
                    _remove(self.folder / _name(step, self.attempt))
            raise
        if self.world.is_main:
            try:
                prune(self.folder, step, self.attempt, self.keep)
            except OSError as error:
                self._notes.append(f"older checkpoints could not be removed ({error}); it is tried again after the next one")

    def wait(self) -> None:
        """Returns when no checkpoint is on its way. Raises TrainingFailed on all ranks when it could not be written and patience is at its end."""
        while self.pending is not None:
            wait_for([self.pending.future], timeout=1.0)
            self.poll()

    def poll(self) -> None:
        """Settles a background checkpoint that has ended on all ranks; costs one small collective while there is one. Raises as :meth:`wait`."""
        if self.pending is None:
            return
        pending = self.pending
        seen = self.world.gather((pending.future.done(), pending.writer.moved, self.clock()))
        now, moved = seen[0][2], sum(rank[1] for rank in seen)
        if not all(rank[0] for rank in seen):
            if moved != pending.moved:
                pending.moved, pending.moved_at = moved, now
            if self.patience and now - pending.moved_at > self.patience:
                self.pending = None
                raise TrainingFailed(self._sentence(pending.step, f"it has taken nothing for {now - pending.moved_at:.0f} s, storagePatience"))
            return
        self.pending = None
        try:
            pending.future.result()
        except CheckpointException as error:
            self._refused(pending.step, error)
        else:
            self._written(pending.step)

    def finish(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Returns when the checkpoint that was begun last is in storage; it is begun again, from the same state, as long as patience lasts.

        Raises TrainingFailed as :meth:`wait`.
        """
        self.wait()
        while self.owed:
            time.sleep(self.world.broadcast(max(0.0, self._retry_at - self.clock())))
            step, facts = self._begun
            self.save(step, model, optimizer, facts)
            self.wait()

    def _written(self, step: int) -> None:
        if self._refused_since is not None:
            self.say(f"storage takes checkpoints again: step {step} is saved")
        self._refused_since, self._pause = None, 0.0
        self.last_step = step
        for note in self._notes:
            self.say(note)
        self._notes.clear()

    def _refused(self, step: int, error: CheckpointException) -> None:
        where = "; ".join(f"rank {rank}: {found[0]}" for rank, found in sorted(error.failures.items())[:3])
        now = self.world.broadcast(self.clock())
        since = now if self._refused_since is None else self._refused_since
        left = since + self.patience - now
        by_storage = all(isinstance(found[0], OSError) for found in error.failures.values())
        if not by_storage or left <= 0:
            raise TrainingFailed(self._sentence(step, where)) from error
        self.owed = True
        self._refused_since = since
        self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE, left)
        self._retry_at = now + self._pause
        self.say(
            f"the checkpoint of step {step} could not be written to {self.folder} ({where}); training goes on,"
            f" and it is tried again for {left:.0f} s (storagePatience)"
        )

    def _sentence(self, step: int, where: str) -> str:
        kept = f"the one of step {self.last_step} is untouched" if self.last_step is not None else "none was written before it in this attempt"
        what = f"the checkpoint of step {step} could not be written to {self.folder} ({where})"
        return f"{what}; {kept}. Make room or mend the storage, then start the same command again"

    def load_newest(self, found: Found | None, model: Any, optimizer: torch.optim.Optimizer) -> Found | None:
        """Fills model, optimizer and this rank's random state from ``found``, or, where it is damaged, from the newest one before it that is not.

        Returns the one that was loaded; None where there was none, and then the weights must be filled anew. Raises TrainingFailed on all ranks
        where all are damaged, and where storage can't be read for as long as patience lasts.
        """
        damaged: set[str] = set()
        while found is not None:
            try:
                self.load(found, model, optimizer)
                return found
            except Damaged as error:
                self.say(f"checkpoint {found.folder.name} is not used: {error}")
                last = error
            damaged.add(found.folder.name)
            found = latest(self.folder, self.world, self.say, self.patience, damaged)
        if damaged:
            # Beginning anew would bill all of it again, on a storage that alters what it is given.
            raise TrainingFailed(
                f"{self.folder}: no checkpoint of the run holds what was written ({', '.join(sorted(damaged))}; {last});"
                " bring one back from a copy, or give the run another name to begin anew"
            )
        return None

    def load(self, found: Found, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Fills model, optimizer and this rank's random state from ``found``, each rank reading its own part, whatever world wrote it.

        Raises Damaged on all ranks where a file does not hold what was written, TrainingFailed where storage can't be read.
        """
        since, pause = self.clock(), FIRST_PAUSE
        while True:
            try:
                self._load(found, model, optimizer)
                break
            except CheckpointException as error:
                rank, why = next((rank, found[0]) for rank, found in sorted(error.failures.items()))
                for failed, _ in error.failures.values():
                    if isinstance(failed, Damaged):
                        raise failed from error
                    if not isinstance(failed, OSError):
                        raise RuntimeError(f"checkpoint {found.folder} does not fit (rank {rank}: {type(failed).__name__}: {failed})") from error
                left = self.world.broadcast(since + self.patience - self.clock())
                if left <= 0:
                    raise TrainingFailed(
                        f"checkpoint {found.folder} can't be read (rank {rank}: {why}); mend the storage, then start the same command again"
                    ) from error
                self.say(f"checkpoint {found.folder.name} can't be read now (rank {rank}: {why}); it is tried again for {left:.0f} s (storagePatience)")
                time.sleep(min(pause, left))
                pause = min(2 * pause, LONGEST_PAUSE)
        self.last_step = found.step

    def _load(self, found: Found, model: Any, optimizer: torch.optim.Optimizer) -> None:
        facts = found.facts
        reader = Reader(found.folder, facts["files"], facts.get("crc32", {}), facts.get("blockBytes", BLOCK))
        failures = {rank: (error, None) for rank, error in enumerate(self.world.gather(_error_of(reader.open))) if error is not None}
        if failures:
            raise CheckpointException("read", failures)  # type: ignore[arg-type]
        state = _state(model, optimizer, self.world)
        if (facts.get("worldSize"), facts.get("device")) != (self.world.size, self.world.device.type):
            del state["rng"]  # one per rank and kind of device; those of another world are not there
        # The weights are filled in place, being the model's own tensors; the optimizer's go through its own loading.
        state_dict_loader.load(state, storage_reader=reader, process_group=self.group)
        set_optimizer_state_dict(model, optimizer, state["optim"])
        if "rng" in state:
            rng = state["rng"][str(self.world.rank)]
            torch.set_rng_state(rng["cpu"])
            if self.world.device.type == "cuda":
                torch.cuda.set_rng_state(rng["cuda"], self.world.device)


@dataclasses.dataclass
class _Pending:
    """A checkpoint on its way; ``moved``: bytes that storage had taken of it, over all ranks, when that last changed, at ``moved_at``."""

    step: int
    writer: Writer
    future: Future[None]
    moved_at: float
    moved: int = 0


def _in_background(work: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # CheckpointException is one
            future.set_exception(error)
        else:
            future.set_result(None)

    # A daemon: a storage that hangs must not keep a process from ending.
    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def _error_of(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except (OSError, Damaged) as error:
        return error
    return None


def prune(folder: Place, newest: int, attempt: int, keep: int) -> None:
    """Of the checkpoints under ``folder`` that this and earlier attempts wrote, up to step ``newest``, leaves the ``keep`` newest whole ones.

    Nothing else is touched, whatever lies there. Raises OSError.
    """
    whole = 0
    for found in find(folder):
        if found.step > newest or found.attempt > attempt:
            continue
        whole += found.torn is None
        if found.torn is not None or whole > keep:
            _remove(found.folder)


def _remove(folder: Place) -> None:
    """Removes a checkpoint, its marker first: one that is half removed is then one that was never finished."""
    (folder / MARKER).delete()
    folder.delete()


def _state(model: Any, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer)
    own = {name for name, _ in model.named_parameters()}
    weights = {name: value for name, value in weights.items() if name in own}  # a tied head would be written a second time
    rng = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(world.device)
    return {"model": weights, "optim": states, "rng": {str(world.rank): rng}}
