"""What `prepare` wrote, as a training job reads it: the manifest, rows by number, and the order in which they are trained on.

Sample number n of a run is row ``permuted(n % rows)`` of epoch ``n // rows``, and step s is samples [s*G, (s+1)*G) for a
global batch of G rows. Neither depends on the number of workers, so a run that goes on with another number of them reads
the same rows in the same order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock

from training.divergence import data_step
from training.errors import BadInput
from training.packing import IGNORED, Shard, Split, cut, little_endian
from training.permutation import permuted
from training.storage import Place, place, redacted

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
SCHEMA = 1
SPLITS = ("train", "eval")
CACHE_VARIABLE = "TRAINING_DATA_CACHE"


@dataclasses.dataclass(frozen=True)
class Source:
    """One source as it was read: its bytes, the documents in it, and the SHA-256 over the SHA-256 of its files in order."""

    uri: str
    bytes: int
    documents: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a folder of prepared data holds. Written last, so that a folder without one is unfinished.

    ``settings`` are those of `prepare` under their file keys; ``inputs`` is the hash of settings and sources by which
    a repeated `prepare` knows its own work.
    """

    sequence_length: int
    vocab_size: int
    eos_token_id: int
    tokenizer_hash: str
    dtype: str
    splits: dict[str, Split]
    sources: tuple[Source, ...]
    settings: dict[str, Any]
    inputs: str

    @property
    def hash(self) -> str:
        """SHA-256 of what decides the rows, wherever the folder lies and however the stream is cut into shards."""
        streams = {name: [split.tokens, split.sha256] for name, split in self.splits.items()}
        deciding = [SCHEMA, self.sequence_length, self.vocab_size, self.eos_token_id, self.tokenizer_hash, self.dtype, streams]
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """Plain data for manifest.json."""
        return {"schema": SCHEMA, "hash": self.hash, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Manifest:
        """The inverse of :meth:`as_json`. Raises KeyError or TypeError where a part is missing or of another type."""
        parts = {field.name: raw[field.name] for field in dataclasses.fields(Manifest)}
        parts["splits"] = {name: Split(**{**split, "shards": tuple(Shard(**shard) for shard in split["shards"])}) for name, split in parts["splits"].items()}
        parts["sources"] = tuple(Source(**source) for source in parts["sources"])
        return Manifest(**parts)


def read_manifest(folder: Place, shown: str) -> Manifest:
    """The manifest in ``folder``, called ``shown`` in errors. Raises BadInput where there is none, or none that can be read."""
    again = "run `python -m training.prepare` again"
    try:
        raw = (folder / MANIFEST).read_json()
    except FileNotFoundError as error:
        if not folder.exists():
            raise BadInput(f"data = {shown}: no such folder; give the output of `python -m training.prepare`") from error
        raise BadInput(f"data = {shown}: no {MANIFEST} in it, so it is unfinished or no prepared data; {again} with this output") from error
    except OSError as error:
        raise BadInput(f"data = {shown}: can't be read ({error})") from error
    except ValueError as error:
        raise BadInput(f"data = {shown}: {MANIFEST} is damaged ({error}); delete the folder and {again}") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        version = raw.get("schema") if isinstance(raw, dict) else None
        raise BadInput(f"data = {shown}: {MANIFEST} has schema {version}, this version reads {SCHEMA}; delete the folder and {again}")
    try:
        return Manifest.from_json(raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"data = {shown}: {MANIFEST} is damaged ({error!r}); delete the folder and {again}") from error


class PreparedData:
    """Rows by number. Shards are memory-mapped; those of a remote folder are first copied to this host, once for all its processes."""

    def __init__(self, folder: Place, manifest: Manifest, shown: str) -> None:
        self.manifest = manifest
        self.folder = folder
        self._shown = shown
        self._maps: dict[str, tuple[npt.NDArray[np.int64], list[npt.NDArray[Any]]]] = {}

    @property
    def tokenizer_folder(self) -> Place:
        """The tokenizer the rows were made with, in Hugging Face format."""
        return self.folder / TOKENIZER

    def rows(self, split: str) -> int:
        """Whole rows in the split; 0 where there is none of that name."""
        found = self.manifest.splits.get(split)
        return found.rows if found else 0

    def row(self, split: str, i: int) -> npt.NDArray[np.int64]:
        """Tokens [i*L, i*L + L + 1) of the split's stream: int64 [L+1]. Raises IndexError outside [0, rows)."""
        if not 0 <= i < self.rows(split):
            raise IndexError(f"row {i} of {self.rows(split)} in the {split} split")
        length = self.manifest.sequence_length
        starts, shards = self._mapped(split)
        start, stop = i * length, i * length + length + 1
        first = int(np.searchsorted(starts, start, side="right")) - 1
        parts: list[npt.NDArray[Any]] = []
        for number in range(first, len(shards)):
            begin = int(starts[number])
            if begin >= stop:
                break
            parts.append(shards[number][max(0, start - begin) : stop - begin])
        return np.concatenate(parts).astype(np.int64)

    def _mapped(self, split: str) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[Any]]]:
        if split not in self._maps:
            shards = self.manifest.splits[split].shards
            files = [Path(self.folder.path) / shard.file for shard in shards] if self.folder.local else self._copied(shards)
            dtype = little_endian(self.manifest.dtype)
            starts = np.cumsum([0, *(shard.tokens for shard in shards[:-1])], dtype=np.int64)
            self._maps[split] = starts, [np.memmap(file, dtype=dtype, mode="r") for file in files]
        return self._maps[split]

    def _copied(self, shards: Sequence[Shard]) -> list[Path]:
        root = os.environ.get(CACHE_VARIABLE) or str(Path.home() / ".cache" / "training-data")
        cache = Path(root) / self.manifest.hash[:16]
        try:
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(cache / "lock"):
                for shard in shards:
                    # The name holds the content's hash, so that data cut into other shards never meets these.
                    self._copy(shard, cache / f"{shard.sha256}.bin")
        except OSError as error:
            raise BadInput(f"data = {self._shown}: can't be copied to {cache} ({error}); free some space or set {CACHE_VARIABLE} to another folder") from error
        return [cache / f"{shard.sha256}.bin" for shard in shards]

    def _copy(self, shard: Shard, target: Path) -> None:
        if target.exists():
            return
        draft = target.with_suffix(".part")
        digest = hashlib.sha256()
        source = self.folder / shard.file
        with source.fs.open_input_stream(source.path) as stream, draft.open("wb") as file:
            while block := stream.read(8 * 2**20):
                digest.update(block)
                file.write(block)
        if digest.hexdigest() != shard.sha256:
            draft.unlink()
            raise BadInput(_damaged(self._shown, shard.file, "its SHA-256 is not the manifest's"))
        draft.replace(target)


def _damaged(shown: str, file: str, what: str) -> str:
    return f"data = {shown}: {file} is damaged ({what}); delete the folder and run `python -m training.prepare` again"


def open_data(uri: str) -> PreparedData:
    """The prepared data in a folder or at a URI.

    Raises BadInput for a folder that is missing, unfinished, of another schema version, or has a shard that is missing or
    of another size than the manifest says.
    """
    folder = place(uri)
    shown = redacted(uri)
    manifest = read_manifest(folder, shown)
    sizes = {info.base_name: info.size for info in folder.children() if info.is_file}
    width = np.dtype(manifest.dtype).itemsize
    for split in manifest.splits.values():
        for shard in split.shards:
            if shard.file not in sizes:
                raise BadInput(_damaged(shown, shard.file, "it is missing"))
            if sizes[shard.file] != shard.tokens * width:
                raise BadInput(_damaged(shown, shard.file, f"{sizes[shard.file]:,} bytes, the manifest says {shard.tokens * width:,}"))
    return PreparedData(folder, manifest, shown)


class MicroBatch(NamedTuple):
    """One forward pass: int64 tensors [B, L]. A label of -100 is not trained on; rows of nothing else only fill the shape."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Step:
    """One rank's part of an optimizer step. ``valid_tokens`` counts its labels that are trained on; ``wait_seconds`` is how long the caller waited."""

    index: int
    micro_batches: list[MicroBatch]
    valid_tokens: int
    wait_seconds: float


def accumulation(global_batch: int, micro_batch: int, world: int) -> int:
    """Micro-batches per rank and step, the same on every rank."""
    return -(-global_batch // (world * micro_batch))


def rows_of_step(rows: int, step: int, global_batch: int, seed: int) -> npt.NDArray[np.int64]:
    """The row numbers [global_batch] of a step, in order, whatever the world size."""
    samples = np.arange(step * global_batch, (step + 1) * global_batch, dtype=np.int64)
    epochs, positions = np.divmod(samples, rows)
    order = np.empty_like(samples)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        order[here] = permuted(positions[here], rows, seed, int(epoch))
    return order


def _micro_batches(
    data: PreparedData, split: str, chosen: npt.NDArray[np.int64], count: int, micro_batch: int, document_mask: bool
) -> tuple[list[MicroBatch], int]:
    """``count`` micro-batches that hold the ``chosen`` rows in order, filled up with rows whose labels are all -100."""
    length = data.manifest.sequence_length
    rows = np.zeros((count * micro_batch, length + 1), dtype=np.int64)
    for slot, row in enumerate(chosen):
        rows[slot] = data.row(split, int(row))
    inputs, labels, positions = cut(rows, data.manifest.eos_token_id, document_mask)
    labels = labels.copy()
    labels[len(chosen) :] = IGNORED

    def tensors(array: npt.NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(part) for part in np.ascontiguousarray(array).reshape(count, micro_batch, length))

    placed = [None] * count if positions is None else tensors(positions)
    batches = [MicroBatch(*parts) for parts in zip(tensors(inputs), tensors(labels), placed, strict=True)]
    return batches, int((labels != IGNORED).sum())


class Batches(Iterator[Step]):
    """The endless training order of one rank, from ``start_step`` on; the next steps are read ahead in one thread.

    Rank r of w takes rows r, r+w, r+2w, ... of each global batch. ``skipped``: ranges [from, to) of data steps that no step is trained on
    (:mod:`training.divergence`). An error while reading ahead is raised by ``next``.
    Close it (or use it in a ``with``) to end the thread.
    """

    def __init__(
        self,
        data: PreparedData,
        split: str,
        global_batch: int,
        micro_batch: int,
        world: int,
        rank: int,
        seed: int,
        start_step: int,
        document_mask: bool,
        prefetch: int = 2,
        skipped: Sequence[tuple[int, int]] = (),
    ) -> None:
        """``global_batch`` and ``micro_batch`` are in rows; ``prefetch`` in steps. Raises BadInput where the split has no row."""
        if data.rows(split) == 0:
            raise BadInput(f"the data has no {split} row; prepare it with more text or a lower sequenceLength")
        self._data, self._split, self._global_batch, self._micro_batch = data, split, global_batch, micro_batch
        self._world, self._rank, self._seed, self._document_mask = world, rank, seed, document_mask
        self._skipped = tuple(skipped)
        self._count = accumulation(global_batch, micro_batch, world)
        self._next = start_step
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._ahead: deque[Future[Step]] = deque()
        for _ in range(max(1, prefetch)):
            self._read_on()

    def _read_on(self) -> None:
        self._ahead.append(self._reader.submit(self._read, self._next))
        self._next += 1

    def _read(self, step: int) -> Step:
        rows = rows_of_step(self._data.rows(self._split), data_step(step, self._skipped), self._global_batch, self._seed)[self._rank :: self._world]
        batches, valid = _micro_batches(self._data, self._split, rows, self._count, self._micro_batch, self._document_mask)
        return Step(step, batches, valid, 0.0)

    def __next__(self) -> Step:
        if not self._ahead:
            raise StopIteration
        begun = time.perf_counter()
        step = self._ahead.popleft().result()
        waited = time.perf_counter() - begun
        self._read_on()
        return dataclasses.replace(step, wait_seconds=waited)

    def close(self) -> None:
        """Ends the thread; there is no next step after it."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def eval_batches(data: PreparedData, rows: int, micro_batch: int, world: int, rank: int, document_mask: bool) -> Iterator[MicroBatch]:
    """``rows`` held-out rows (all, where there are fewer), dealt to the ranks as in training: equally many micro-batches on every rank.

    They are spread evenly over the split: neighbouring rows come from the same few documents and would speak for those only.
    """
    held = data.rows("eval")
    count = min(rows, held)
    chosen = np.arange(count, dtype=np.int64) * held // max(count, 1)
    mine = chosen[rank::world]
    for number in range(accumulation(len(chosen), micro_batch, world)):
        batches, _ = _micro_batches(data, "eval", mine[number * micro_batch : (number + 1) * micro_batch], 1, micro_batch, document_mask)
        yield batches[0]
