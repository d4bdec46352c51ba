"""torch.distributed.checkpoint on any place: several files of a rank at once, and a checksum for every block of every file.

A block (``BLOCK`` bytes of a file) is what one request reads and what is checked by itself: a rank that needs a part of a file, as after a
change of world size, reads and checks the blocks that hold it and no others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import pyarrow.fs as pafs
import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner

from training.storage import Place

BLOCK = 16 * 2**20
# Of one rank. A store answers each request after its own time: what is asked for at the same time waits together.
FILES_AT_ONCE, READS_AT_ONCE = 4, 8
# An upload's parts go out in the background, and what waits for a slow store is in memory: a file's parts are waited for after so many bytes.
IN_FLIGHT = 64 * 2**20
_METADATA = ".metadata"


class Damaged(Exception):
    """A checkpoint that does not hold what was written."""


@dataclasses.dataclass(frozen=True)
class Sums:
    """A file as it was written: bytes, and the CRC-32 of each block (faster than any hash that Python has, and what a flipped bit can't pass)."""

    name: str
    size: int
    crc32: tuple[int, ...]


class _Stream(io.RawIOBase):
    """A file that is being written. After an error it takes the rest and drops it: torch would lose an exception of one of its threads."""

    def __init__(self, files: _Target, path: str) -> None:
        super().__init__()
        self.files, self.path = files, path
        self.at, self.in_flight = 0, 0
        self.crc32: list[int] = []
        self.raw: Any = None
        files.attempt(self._open)

    def _open(self) -> None:
        place = self.files.place
        self.raw = open(self.path, "wb") if place.local else place.fs.open_output_stream(self.path)  # noqa: SIM115

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.files.attempt(lambda: self._put(view))
        return len(view)

    def _put(self, view: memoryview) -> None:
        self.raw.write(view)
        self.in_flight += len(view)
        if self.in_flight >= IN_FLIGHT:
            self.raw.flush()
            self.in_flight = 0
        self.files.moved += len(view)
        while len(view):
            part = view[: BLOCK - self.at % BLOCK]
            if self.at % BLOCK == 0:
                self.crc32.append(0)
            self.crc32[-1] = zlib.crc32(part, self.crc32[-1])
            self.at += len(part)
            view = view[len(part) :]

    def flush(self) -> None:
        """Nothing: torch flushes after each tensor, and a store would be waited for each time."""

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.files.attempt(self._end)
            if self.files.error is not None and self.raw is not None:
                with contextlib.suppress(Exception):  # the first error is the one that is told
                    self.raw.close()

    def _end(self) -> None:
        if self.files.place.local:  # in an object store it has no meaning
            self.raw.flush()
            os.fsync(self.raw.fileno())
        self.raw.close()
        name = Path(self.path).name
        self.files.sums[name] = Sums(name, self.at, tuple(self.crc32))


class _Target(FileSystemBase):
    """What torch's writer needs of a filesystem. ``error``: the first one, after which nothing is written any more."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.sums: dict[str, Sums] = {}
        self.moved = 0
        self.error: OSError | None = None

    def attempt(self, work: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            work()
        except OSError as error:
            self.error = error
        except Exception as error:  # a filesystem of fsspec raises what its own client does
            self.error = OSError(f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with _Stream(self, str(path)) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        # torch commits by renaming its metadata, which a store does by copying; here the marker commits.
        return f"{path}/{suffix.removesuffix('.tmp')}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        assert str(path) == str(new_path), "only metadata is renamed"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(self.place.fs, pafs.S3FileSystem):  # S3 has no folders, and each rank would ask for it
            self.attempt(lambda: self.place.fs.create_dir(str(path), recursive=True))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False  # asked of the metadata only, and leftovers are overwritten

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        raise AssertionError("nothing exists that could be removed")


class Writer(FileSystemWriter):
    """Writes a checkpoint into ``folder``. ``commit(sums of all ranks' files)`` is called on rank 0 when all of them are there; OSErrors of any rank
    and of ``commit`` reach all ranks as torch's CheckpointException."""

    def __init__(self, folder: Place, commit: Callable[[Sequence[Sums]], None]) -> None:
        super().__init__(folder.path, sync_files=False, thread_count=FILES_AT_ONCE)  # _Stream syncs; torch would sync all of the machine's disks
        self.target = _Target(folder)
        self.fs = self.target  # type: ignore[assignment]
        self.path = folder.path
        self.commit = commit

    @property
    def moved(self) -> int:
        """Bytes that storage has taken from this rank so far."""
        return self.target.moved

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        written: list[Any] = super().write_data(plan, planner).wait()
        self._told()
        if len(written) != len(plan.items):
            raise RuntimeError(f"{len(plan.items) - len(written)} of {len(plan.items)} tensors were not written")
        future: torch.futures.Future[list[Any]] = torch.futures.Future()
        future.set_result([*written, *self.target.sums.values()])
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        sums = [item for rank in results for item in rank if isinstance(item, Sums)]
        super().finish(metadata, [[item for item in rank if not isinstance(item, Sums)] for rank in results])
        self._told()
        self.commit([*sums, self.target.sums[_METADATA]])

    def _told(self) -> None:
        if self.target.error is not None:
            raise self.target.error


class Stager(StateDictStager):
    """Copies states to host memory that is kept from one to the next: asked for once, and pinned, so that the bus sets the pace.

    torch's own pins by registering each tensor's memory by itself, small ones in the same page too; here it comes pinned from CUDA's host allocator.
    """

    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__(pin_memory=pin_memory)
        self._reserved: dict[int, list[torch.UntypedStorage]] = {}
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def reserve(self, sizes: Sequence[int]) -> None:
        """Begins to ask, in the background, for memory for storages of ``sizes`` (bytes): pinning takes half a second a gigabyte, and the first copy would
        wait for it."""

        def work() -> None:
            with contextlib.suppress(RuntimeError):  # too little memory: copy() asks again, and tells of it
                for size in sorted(sizes, reverse=True):
                    if self._closing.is_set():
                        return
                    self._reserved.setdefault(size, []).append(self._new(size))

        self._thread = threading.Thread(target=work, name="checkpoint memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Forgets its memory; the last copy keeps its own. Returns when none is asked for any more: a thread that comes back from C++ after Python's end
        would end the process."""
        self._closing.set()
        self._settle()
        self._reserved.clear()
        super().close()  # type: ignore[no-untyped-call]

    def _settle(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _new(self, size: int) -> torch.UntypedStorage:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pin_memory).untyped_storage()

    def _stage_untyped_storage(self, storage: torch.UntypedStorage, non_blocking: bool = False) -> torch.UntypedStorage:
        kept: torch.UntypedStorage | None = self._cached_storage_mapping.get(storage)  # type: ignore[no-untyped-call]
        if kept is None or kept.nbytes() != storage.nbytes():
            reserved = self._reserved.get(storage.nbytes())
            kept = reserved.pop() if reserved else self._new(storage.nbytes())
            self._cached_storage_mapping[storage] = kept
        kept.copy_(storage, non_blocking=non_blocking)
        return kept

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` on the CPU, whole when this returns; it is overwritten by the next one."""
        self._settle()
        copied: dict[str, Any] = self.stage(state, non_blocking=self.pin_memory)
        if self.pin_memory:
            torch.cuda.synchronize()
        return copied


class Reader(FileSystemReader):
    """Reads a checkpoint of ``files`` (name: bytes), ``crc32`` (name: of each block of ``block`` bytes; one that is missing is not checked).

    Raises Damaged where a block is not what was written.
    """

    def __init__(self, folder: Place, files: Mapping[str, int], crc32: Mapping[str, Sequence[int]], block: int) -> None:
        super().__init__(folder.path)
        self.folder, self.files, self.crc32, self.block = folder, files, crc32, block
        self.fs = _Source()  # type: ignore[assignment]
        self.path = folder.path
        self._open: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._metadata: Metadata | None = None
        self._ahead: _Ahead | None = None

    def open(self) -> None:
        """Reads the metadata. Raises OSError or Damaged: torch itself would log a trace for each."""
        import pickle

        size = self.files.get(_METADATA, 0)
        data = b"".join(self.fetch((_METADATA, number)) for number in range(-(-size // self.block)))
        try:
            self._metadata = pickle.loads(data)  # noqa: S301 (torch's own format; whoever may write it may write the weights)
        except Exception as error:
            raise Damaged(f"{_METADATA} can't be read ({type(error).__name__}: {error})") from error

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        assert self._metadata is not None, "open() comes first"
        return self._metadata

    def fetch(self, key: tuple[str, int]) -> bytes:
        """Block ``key[1]`` of file ``key[0]``, checked."""
        name, number = key
        begin = number * self.block
        length = min(self.block, self.files[name] - begin)
        with self._lock:
            if name not in self._open:
                try:
                    self._open[name] = self.folder.fs.open_input_file(f"{self.folder.path}/{name}")
                except FileNotFoundError as error:
                    raise Damaged(f"{name} is missing") from error
            file = self._open[name]
        # A file of fsspec has one position for all threads.
        with self._lock if isinstance(self.folder.fs, pafs.PyFileSystem) else contextlib.nullcontext():
            data = bytes(file.read_at(length, begin))
        expected = self.crc32.get(name)
        if len(data) != length or (expected is not None and zlib.crc32(data) != expected[number]):
            raise Damaged(f"{name} is not what was written (in bytes {begin} to {begin + length - 1})")
        return data

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        where = self.storage_data
        items = sorted(plan.items, key=lambda item: (where[item.storage_index].relative_path, where[item.storage_index].offset))
        needed: dict[tuple[str, int], None] = {}
        for item in items:
            info = where[item.storage_index]
            needed.update(dict.fromkeys((info.relative_path, number) for number in _numbers(info.offset, info.length, self.block)))
        with ThreadPoolExecutor(READS_AT_ONCE) as pool:
            self._ahead = _Ahead(pool, list(needed), self.fetch)
            return super().read_data(dataclasses.replace(plan, items=items), planner)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        assert self._ahead is not None
        data = bytearray()
        numbers = _numbers(sinfo.offset, sinfo.length, self.block)
        for number, block in zip(numbers, self._ahead.take(sinfo.relative_path, numbers), strict=True):
            begin = max(sinfo.offset - number * self.block, 0)
            data += memoryview(block)[begin : sinfo.offset + sinfo.length - number * self.block]
        return io.BytesIO(data)


def _numbers(offset: int, length: int, block: int) -> range:
    return range(offset // block, -(-(offset + length) // block))


class _Ahead:
    """Blocks in the order in which they are needed, ``READS_AT_ONCE`` of them read ahead; those before the last one taken are forgotten."""

    def __init__(self, pool: ThreadPoolExecutor, needed: Sequence[tuple[str, int]], fetch: Callable[[tuple[str, int]], bytes]) -> None:
        self.pool, self.needed, self.fetch = pool, needed, fetch
        self.place = {key: i for i, key in enumerate(needed)}
        self.futures: dict[int, Future[bytes]] = {}
        self.begun = 0

    def take(self, name: str, numbers: Sequence[int]) -> Iterator[bytes]:
        """The blocks ``numbers`` of a file, in order. The same ones may be asked for again: two parts of a tensor may lie in them."""
        wanted = [self.place[name, number] for number in numbers]
        for passed in [i for i in self.futures if i < wanted[0]]:
            del self.futures[passed]
        for at in wanted:
            while self.begun < min(at + READS_AT_ONCE, len(self.needed)):
                self.futures[self.begun] = self.pool.submit(self.fetch, self.needed[self.begun])
                self.begun += 1
            yield self.futures[at].result()


class _Source(FileSystemBase):
    """What torch's reader needs of a filesystem: next to nothing, for :class:`Reader` reads by itself."""

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        yield io.BytesIO()

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        raise AssertionError("a reader renames nothing")

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        raise AssertionError("a reader makes nothing")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return True

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        raise AssertionError("a reader removes nothing")
