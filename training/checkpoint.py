"""Checkpoints that are whole or are not used: torch.distributed.checkpoint into a folder, and a marker file last.

``checkpoints/step-00000200.2/`` is step 200 as written by attempt 2 of the run. ``complete.json`` in it is written when all
ranks' files are, and lists them with their sizes; a folder without it, or with a file missing or short, is torn and never read.
Attempts never write into each other's folders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict

from training.errors import TrainingFailed
from training.storage import Place
from training.world import World

MARKER = "complete.json"
_NAME = re.compile(r"step-(\d{8})\.(\d+)")


def _name(step: int, attempt: int) -> str:
    return f"step-{step:08d}.{attempt}"


class _Files(FileSystemBase):
    """What torch.distributed.checkpoint needs of a filesystem, given by pyarrow: S3 without a further package."""

    def __init__(self, fs: pafs.FileSystem) -> None:
        self.fs = fs

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        stream = self.fs.open_output_stream(str(path)) if "w" in mode else self.fs.open_input_file(str(path))
        with stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.fs.move(str(path), str(new_path))

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self.fs.create_dir(str(path), recursive=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return bool(self.fs.get_file_info(str(path)).type != pafs.FileType.NotFound)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self.fs.delete_file(str(path))


def _writer(folder: Place) -> FileSystemWriter:
    if folder.local:
        return FileSystemWriter(folder.path)
    # fsync has no meaning in an object store, and torch would sync all of this machine's disks instead.
    writer = FileSystemWriter(folder.path, sync_files=False)
    writer.fs = _Files(folder.fs)  # type: ignore[assignment]
    writer.path = folder.path
    return writer


def _reader(folder: Place) -> FileSystemReader:
    reader = FileSystemReader(folder.path)
    if not folder.local:
        reader.fs = _Files(folder.fs)  # type: ignore[assignment]
        reader.path = folder.path
    return reader


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
        files: Mapping[str, int] = facts["files"]
    except FileNotFoundError:
        return "it was never finished", {}
    except (ValueError, KeyError, TypeError):
        return f"its {MARKER} is damaged", {}
    sizes = {Path(info.path).name: info.size for info in folder.children()}
    for name, size in files.items():
        if sizes.get(name) != size:
            return f"{name} has {sizes.get(name, 'no')} bytes, not {size}", facts
    return None, facts


def latest(folder: Place, world: World, say: Callable[[str], None]) -> Found | None:
    """The newest whole checkpoint under ``folder``, the same on every rank (a collective); says so when a newer one is torn."""

    def choose() -> tuple[int, int, Mapping[str, Any]] | None:
        for found in find(folder):
            if found.torn is None:
                return found.step, found.attempt, found.facts
            say(f"checkpoint {found.folder.name} is not used: {found.torn}")
        return None

    chosen = world.broadcast(world.on_main(choose))
    if chosen is None:
        return None
    step, attempt, facts = chosen
    return Found(step, attempt, folder / _name(step, attempt), None, facts)


class Checkpointer:
    """Writes, prunes and loads one run's checkpoints. Its methods are collectives: every rank calls each, in the same order."""

    def __init__(self, folder: Place, world: World, attempt: int, keep: int, asynchronous: bool) -> None:
        self.folder, self.world, self.attempt, self.keep, self.asynchronous = folder, world, attempt, keep, asynchronous
        # A group of its own: in the background its collectives would mix with those of training.
        self.group = dist.new_group(backend="gloo")
        self.pending: tuple[int, Future[Any]] | None = None
        self.last_step: int | None = None

    def save(self, step: int, model: Any, optimizer: torch.optim.Optimizer, facts: Mapping[str, Any]) -> None:
        """Writes step ``step``; in the background where asynchronous. ``facts`` (plain data) goes into the marker.

        Raises TrainingFailed on all ranks when this checkpoint, or the one still pending, can't be written.
        """
        self.wait()
        folder = self.folder / _name(step, self.attempt)
        try:
            if self.asynchronous:
                future = state_dict_saver.async_save(_state(model, optimizer, self.world), storage_writer=_writer(folder), process_group=self.group)
                assert isinstance(future, Future)
                self.pending = (step, future)
                self._facts = dict(facts)
                return
            state_dict_saver.save(_state(model, optimizer, self.world), storage_writer=_writer(folder), process_group=self.group)
        except (CheckpointException, OSError, RuntimeError) as error:
            self._failed(step, error)
        self._finish(step, facts)

    def wait(self) -> None:
        """Returns when no checkpoint is on its way. Raises TrainingFailed on all ranks when it could not be written."""
        if self.pending is None:
            return
        step, future = self.pending
        self.pending = None
        try:
            future.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            self._failed(step, error)
        self._finish(step, self._facts)

    def poll(self) -> None:
        """Completes a background checkpoint that has ended on all ranks; costs one small collective while there is one."""
        if self.pending is not None and all(self.world.gather(self.pending[1].done())):
            self.wait()

    def _finish(self, step: int, facts: Mapping[str, Any]) -> None:
        folder = self.folder / _name(step, self.attempt)

        def mark() -> None:
            files = {Path(info.path).name: info.size for info in folder.children() if Path(info.path).name != MARKER}
            try:
                own = {"step": step, "attempt": self.attempt, "worldSize": self.world.size, "device": self.world.device.type, "files": files}
                (folder / MARKER).write_json({**facts, **own})
            except OSError as error:
                raise TrainingFailed(self._sentence(step, f"rank 0: {error}")) from error
            self._prune(step)

        self.world.on_main(mark)
        self.last_step = step

    def _failed(self, step: int, error: BaseException) -> None:
        failures = error.failures if isinstance(error, CheckpointException) else {self.world.rank: (error, None)}
        where = "; ".join(f"rank {rank}: {found[0]}" for rank, found in sorted(failures.items())[:3])
        folder = self.folder / _name(step, self.attempt)
        # The half-written files are of no use to anyone and may be what fills the disk.
        with contextlib.suppress(OSError):
            if self.world.is_main:
                folder.delete()
        raise TrainingFailed(self._sentence(step, where)) from error

    def _sentence(self, step: int, where: str) -> str:
        kept = f"the one of step {self.last_step} is untouched" if self.last_step is not None else "none was written before it in this attempt"
        what = f"the checkpoint of step {step} could not be written to {self.folder} ({where})"
        return f"{what}; {kept}. Make room or mend the storage, then start the same command again"

    def _prune(self, newest: int) -> None:
        """Keeps the newest ``keep`` whole checkpoints up to step ``newest``; older ones and torn leftovers of earlier attempts go."""
        whole = 0
        for found in find(self.folder):
            if found.step > newest:
                continue
            whole += found.torn is None
            if (found.torn is None and whole > self.keep) or (found.torn is not None and found.attempt < self.attempt):
                found.folder.delete()

    def load(self, found: Found, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Fills model, optimizer and this rank's random state from ``found``, each rank reading its own part, whatever world wrote it."""
        state = _state(model, optimizer, self.world)
        if (found.facts.get("worldSize"), found.facts.get("device")) != (self.world.size, self.world.device.type):
            del state["rng"]  # one per rank and kind of device; those of another world are not there
        # The weights are filled in place, being the model's own tensors; the optimizer's go through its own loading.
        state_dict_loader.load(state, storage_reader=_reader(found.folder), process_group=self.group)
        set_optimizer_state_dict(model, optimizer, state["optim"])
        if "rng" in state:
            rng = state["rng"][str(self.world.rank)]
            torch.set_rng_state(rng["cpu"])
            if self.world.device.type == "cuda":
                torch.cuda.set_rng_state(rng["cuda"], self.world.device)
        self.last_step = found.step


def _state(model: Any, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer)
    own = {name for name, _ in model.named_parameters()}
    weights = {name: value for name, value in weights.items() if name in own}  # a tied head would be written a second time
    rng = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(world.device)
    return {"model": weights, "optim": states, "rng": {str(world.rank): rng}}
