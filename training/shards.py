"""Rows out of the shards of a split: mapped where they lie on this host, else by range reads while a copy is made in the background.

A run on remote data starts at once. Its order is a shuffle of the whole split, so its first steps already touch every shard: rows are read one
by one, many at a time, and each shard comes from this host's disk as soon as its copy there is whole and has the manifest's SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from training.errors import BadInput, TrainingFailed
from training.packing import Shard
from training.storage import Place

CACHE_VARIABLE = "TRAINING_DATA_CACHE"
LIMIT_VARIABLE = "TRAINING_DATA_CACHE_GIB"
READERS = 24  # range reads at a time, of one process: pyarrow's S3 client keeps 25 connections
PATIENCE = 120.0  # seconds that a store may be away before a read gives up; the store client's own retries come on top
_LONGEST_PAUSE = 5.0
_BLOCK = 8 * 2**20


class Stopped(Exception):
    """Whoever wanted the rows has no use for them any more."""


class Rows:
    """The rows of one split: row i of length L is tokens [i*L, i*L + L + 1) of its shards, one after the other."""

    def __init__(self, folder: Place, shards: Sequence[Shard], dtype: np.dtype[Any], length: int, cache: Path, shown: str) -> None:
        self._folder, self._shards, self._dtype, self._length, self._shown = folder, shards, dtype, length, shown
        self._starts = np.cumsum([0, *(shard.tokens for shard in shards)], dtype=np.int64)
        self._maps: dict[int, npt.NDArray[Any]] = {}
        self._remote: _Remote | None = None
        if not folder.local:
            self._remote = _Remote(folder, shards, dtype.itemsize, cache, shown)

    def read(self, rows: npt.NDArray[np.int64], stop: threading.Event) -> npt.NDArray[Any]:
        """The rows with these numbers: [n, L+1] in the shards' own type.

        Raises BadInput for a damaged shard, TrainingFailed for a store that does not answer for PATIENCE seconds, Stopped when ``stop`` is set.
        """
        read = np.empty((len(rows), self._length + 1), self._dtype)
        coming: list[tuple[npt.NDArray[Any], Future[bytes]]] = []
        if self._remote:
            self._remote.check()
        for row, slot in zip(rows.tolist(), read, strict=True):
            begin, end = row * self._length, (row + 1) * self._length + 1
            number = int(np.searchsorted(self._starts, begin, side="right")) - 1
            while begin < end:
                until = min(end, int(self._starts[number + 1]))
                where = slot[begin - row * self._length : until - row * self._length]
                first, count = begin - int(self._starts[number]), until - begin
                mapped = self._mapped(number)
                if mapped is None:
                    assert self._remote is not None
                    coming.append((where, self._remote.begin(number, first, count, stop)))
                else:
                    where[:] = mapped[first : first + count]
                begin, number = until, number + 1
        for where, future in coming:
            where[:] = np.frombuffer(future.result(), self._dtype)
        return read

    def _mapped(self, number: int) -> npt.NDArray[Any] | None:
        if number not in self._maps:
            if self._remote and not self._remote.is_here(number):
                return None
            file = self._remote.copy_of(number) if self._remote else Path(self._folder.path) / self._shards[number].file
            self._maps[number] = np.memmap(file, dtype=self._dtype, mode="r")
        return self._maps[number]

    def close(self) -> None:
        """Ends the copying in the background; what is copied stays."""
        if self._remote:
            self._remote.close()


class _Remote:
    """The shards of one split in a store, and their copies on this host: one process of the host copies, all of them read."""

    def __init__(self, folder: Place, shards: Sequence[Shard], width: int, cache: Path, shown: str) -> None:
        self._folder, self._shards, self._width, self._cache, self._shown = folder, shards, width, cache, shown
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="rows")
        self._open: dict[int, Any] = {}
        # A file behind Python code has one position for all threads; pyarrow's own reads at any.
        self._one_at_a_time = threading.Lock() if folder.fs.type_name.startswith("py::") else contextlib.nullcontext()
        self._names = frozenset(f"{shard.sha256}.bin" for shard in shards)
        self._here: frozenset[str] = frozenset()
        self._closed = threading.Event()
        self._problem: BadInput | None = None
        try:
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            cache_limit()
            self.check()
        except OSError as error:
            raise BadInput(f"data = {shown}: can't be copied to {cache} ({error}); free some space or set {CACHE_VARIABLE} to another folder") from error
        self._copier = threading.Thread(target=self._copy_all, name="copying")
        self._copier.start()

    def check(self) -> None:
        """Looks which shards are copied by now. Raises what the copying found out."""
        if self._problem is not None:
            raise self._problem
        if len(self._here) < len(self._names):
            try:
                self._here = self._names.intersection(os.listdir(self._cache))
            except FileNotFoundError:  # removed while the run goes on; what is mapped stays, the rest comes from the store again
                self._here = frozenset()

    def is_here(self, number: int) -> bool:
        return self.copy_of(number).name in self._here

    def copy_of(self, number: int) -> Path:
        """The name holds the content's hash, so that data cut into other shards never meets these."""
        return self._cache / f"{self._shards[number].sha256}.bin"

    def close(self) -> None:
        self._closed.set()
        self._readers.shutdown(cancel_futures=True)
        self._copier.join()

    # Reading from the store

    def begin(self, number: int, first: int, count: int, stop: threading.Event) -> Future[bytes]:
        """Tokens [first, first + count) of a shard."""
        return self._readers.submit(self._read, number, first * self._width, count * self._width, lambda: stop.is_set() or self._closed.is_set())

    def _read(self, number: int, offset: int, size: int, stopped: Callable[[], bool]) -> bytes:
        end, pause = time.monotonic() + PATIENCE, 0.1
        while True:
            if stopped():
                raise Stopped
            try:
                block = self._read_once(number, offset, size)
                break
            except FileNotFoundError as error:
                raise BadInput(damaged(self._shown, self._shards[number].file, "it is missing")) from error
            except OSError as error:
                if time.monotonic() + pause > end:
                    raise TrainingFailed(
                        f"data = {self._shown}: {self._shards[number].file} could not be read for {PATIENCE:.0f} seconds"
                        f" ({' '.join(str(error).split())[:200]}); start the same command again when the store answers"
                    ) from error
            self._closed.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if len(block) != size:
            raise BadInput(damaged(self._shown, self._shards[number].file, f"it ends at byte {offset + len(block):,}"))
        return block

    def _read_once(self, number: int, offset: int, size: int) -> bytes:
        file = self._open.get(number)
        if file is None:  # opened twice where two threads meet here; in turn would mean a round trip after the other for hundreds of shards
            at = self._folder / self._shards[number].file
            file = self._open.setdefault(number, at.fs.open_input_file(at.path))
        with self._one_at_a_time:
            return bytes(file.read_at(size, offset))

    # Copying in the background

    def _over(self) -> bool:
        # A process that ends waits for its threads, and this one may have hours to go.
        return self._closed.is_set() or not threading.main_thread().is_alive()

    def _copy_all(self) -> None:
        lock = FileLock(self._cache / f"{self._shards[0].sha256[:16]}.lock", timeout=0)
        while not self._over():
            try:
                with lock:
                    self._copy_missing()
                return
            except Timeout:
                self._closed.wait(1.0)  # another process of this host is at it; should it end early, this one goes on
            except BadInput as problem:
                self._problem = problem
                return
            except (OSError, TrainingFailed, Stopped):
                return  # no room, or no store: rows are read one by one as long as that works, and it tells if it does not

    def _copy_missing(self) -> None:
        for number, shard in enumerate(self._shards):
            if self.copy_of(number).exists():
                continue
            if shard.tokens * self._width > _room(self._cache):
                return
            # Once more, for what came over the network may have been damaged on the way.
            if not self._copy(number) and not self._copy(number):
                raise BadInput(damaged(self._shown, shard.file, "its SHA-256 is not the manifest's"))

    def _copy(self, number: int) -> bool:
        shard, target = self._shards[number], self.copy_of(number)
        draft, digest, size = target.with_suffix(".part"), hashlib.sha256(), shard.tokens * self._width
        try:
            with draft.open("wb") as file:
                for offset in range(0, size, _BLOCK):
                    block = self._read(number, offset, min(_BLOCK, size - offset), self._over)
                    digest.update(block)
                    file.write(block)
            whole = digest.hexdigest() == shard.sha256
            if whole:
                draft.replace(target)
            return whole
        finally:
            draft.unlink(missing_ok=True)


def cache_folder(data_hash: str) -> Path:
    """Where this host keeps copies of the data with this hash."""
    root = os.environ.get(CACHE_VARIABLE) or str(Path.home() / ".cache" / "training-data")
    return Path(root) / data_hash[:16]


def cache_limit() -> int | None:
    """The most bytes that all copies on this host may take; None: half of what would be free without them. Raises BadInput for a LIMIT_VARIABLE that
    is no number.
    """
    text = os.environ.get(LIMIT_VARIABLE)
    if text is None:
        return None
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < 2**40:
        raise BadInput(f"{LIMIT_VARIABLE} = {text!r} is no number of GiB; write 200, or 0 to copy nothing")
    return int(limit * 2**30)


def _room(cache: Path) -> int:
    """Bytes that may be copied to this host's cache now, besides all that is copied already, of whatever data."""
    used = sum(file.stat().st_size for pattern in ("*.bin", "*.part") for file in cache.parent.rglob(pattern))
    free, limit = shutil.disk_usage(cache).free, cache_limit()
    return min(free, (free + used) // 2 - used if limit is None else limit - used)


def damaged(shown: str, file: str, what: str) -> str:
    """The sentence for a shard that is not what the manifest says."""
    return f"data = {shown}: {file} is damaged ({what}); delete the folder and run `python -m training.prepare` again"
