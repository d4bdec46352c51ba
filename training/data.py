"""What `prepare` wrote, as a training job reads it: the manifest, rows by number, and the order in which they are trained on.

Sample number n of a run is row ``permuted(n % rows)`` of epoch ``n // rows``, and step s is samples [s*G, (s+1)*G) for a
global batch of G rows. Neither depends on the number of workers, so a run that goes on with another number of them reads
the same rows in the same order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from training.divergence import data_step
from training.errors import BadInput
from training.packing import IGNORED, Shard, Split, cut, little_endian
from training.permutation import permuted
from training.shards import READERS, Rows, cache_folder, damaged
from training.storage import Place, place, redacted

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
SCHEMA = 1
SPLITS = ("train", "eval")
# Of a rank, from a store: four seconds of a fast GPU's tokens, so that a slow answer now and then is not noticed.
_TOKENS_AHEAD, _MOST_STEPS = 2**18, 256
_EVAL_AHEAD = 2


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
    """Rows by number, of a folder on this host or of a store far away (training/shards.py)."""

    def __init__(self, folder: Place, manifest: Manifest, shown: str) -> None:
        self.manifest = manifest
        self.folder = folder
        self._shown = shown
        self._splits: dict[str, Rows] = {}
        self._making = threading.Lock()
        self._never = threading.Event()

    @property
    def tokenizer_folder(self) -> Place:
        """The tokenizer the rows were made with, in Hugging Face format."""
        return self.folder / TOKENIZER

    def rows(self, split: str) -> int:
        """Whole rows in the split; 0 where there is none of that name."""
        found = self.manifest.splits.get(split)
        return found.rows if found else 0

    def read(self, split: str, rows: npt.NDArray[np.int64], stop: threading.Event | None = None) -> npt.NDArray[Any]:
        """The rows of the split with these numbers: [n, L+1] unsigned integers, row i being tokens [i*L, i*L + L + 1) of its stream.

        Raises IndexError for a number outside [0, rows), BadInput for a damaged shard, TrainingFailed for a store that does not answer,
        shards.Stopped when ``stop`` is set meanwhile.
        """
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.rows(split):
            raise IndexError(f"rows {int(rows.min())} to {int(rows.max())} of {self.rows(split)} in the {split} split")
        read = self._rows_of(split).read(rows, stop or self._never)
        if read.size and int(read.max()) >= self.manifest.vocab_size:
            raise BadInput(damaged(self._shown, f"the {split} split", f"it holds token {int(read.max()):,}, the vocabulary has {self.manifest.vocab_size:,}"))
        return read

    def row(self, split: str, i: int) -> npt.NDArray[np.int64]:
        """One row: int64 [L+1]. Raises as :meth:`read`."""
        found: npt.NDArray[np.int64] = self.read(split, np.array([i], dtype=np.int64))[0].astype(np.int64)
        return found

    def _rows_of(self, split: str) -> Rows:
        with self._making:
            if split not in self._splits:
                shards, dtype = self.manifest.splits[split].shards, little_endian(self.manifest.dtype)
                self._splits[split] = Rows(self.folder, shards, dtype, self.manifest.sequence_length, cache_folder(self.manifest.hash), self._shown)
            return self._splits[split]

    def close(self) -> None:
        """Ends what goes on in the background. Reading again starts it anew."""
        while self._splits:
            self._splits.popitem()[1].close()


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
                raise BadInput(damaged(shown, shard.file, "it is missing"))
            if sizes[shard.file] != shard.tokens * width:
                raise BadInput(damaged(shown, shard.file, f"{sizes[shard.file]:,} bytes, the manifest says {shard.tokens * width:,}"))
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
    data: PreparedData,
    split: str,
    chosen: npt.NDArray[np.int64],
    count: int,
    micro_batch: int,
    document_mask: bool,
    pin: bool = False,
    stop: threading.Event | None = None,
) -> tuple[list[MicroBatch], int]:
    """``count`` micro-batches that hold the ``chosen`` rows in order, filled up with rows whose labels are all -100."""
    length, filled = data.manifest.sequence_length, len(chosen)
    read = data.read(split, chosen, stop)
    shape = (count * micro_batch, length)
    ids, labels = torch.zeros(shape, dtype=torch.int64, pin_memory=pin), torch.full(shape, IGNORED, dtype=torch.int64, pin_memory=pin)
    positions = None
    if document_mask:
        inputs, targets, places = cut(read.astype(np.int64), data.manifest.eos_token_id, document_mask)
        assert places is not None
        positions = torch.arange(length, dtype=torch.int64).repeat(shape[0], 1)
        positions.numpy()[:filled] = places
        positions = positions.pin_memory() if pin else positions
    else:
        inputs, targets = read[:, :-1], read[:, 1:]
    ids.numpy()[:filled], labels.numpy()[:filled] = inputs, targets
    valid = int((targets != IGNORED).sum()) if document_mask else targets.size

    def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.view(count, micro_batch, length).unbind()

    placed = [None] * count if positions is None else parts(positions)
    return [MicroBatch(*three) for three in zip(parts(ids), parts(labels), placed, strict=True)], valid


class Batches(Iterator[Step]):
    """The endless training order of one rank, from ``start_step`` on; the next steps are read ahead in threads.

    Rank r of w takes rows r, r+w, r+2w, ... of each global batch. ``skipped``: ranges [from, to) of data steps that no step is trained on
    (:mod:`training.divergence`). An error while reading ahead is raised by ``next``.
    Close it (or use it in a ``with``) to end the threads.
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
        pin: bool = False,
    ) -> None:
        """``global_batch`` and ``micro_batch`` are in rows; ``prefetch`` in steps, more where rows come from afar and a step has few.

        ``pin``: into page-locked memory, from which a GPU copies while it computes. Raises BadInput where the split has no row.
        """
        if data.rows(split) == 0:
            raise BadInput(f"the data has no {split} row; prepare it with more text or a lower sequenceLength")
        self._data, self._split, self._global_batch, self._micro_batch = data, split, global_batch, micro_batch
        self._world, self._rank, self._seed, self._document_mask = world, rank, seed, document_mask
        self._skipped, self._pin = tuple(skipped), pin
        self._count = accumulation(global_batch, micro_batch, world)
        self._next = start_step
        # Steps wait for the store side by side, so that one row a step is no round trip a step.
        steps, threads = max(1, prefetch), 1
        if not data.folder.local:
            mine = -(-global_batch // world) * data.manifest.sequence_length
            steps = max(steps, min(_MOST_STEPS, -(-_TOKENS_AHEAD // mine)))
            threads = min(steps, READERS)
        self._reader = ThreadPoolExecutor(threads, thread_name_prefix="prefetch")
        self._stop = threading.Event()
        self._ahead: deque[Future[Step]] = deque()
        for _ in range(steps):
            self._read_on()

    def _read_on(self) -> None:
        self._ahead.append(self._reader.submit(self._read, self._next))
        self._next += 1

    def _read(self, step: int) -> Step:
        rows = rows_of_step(self._data.rows(self._split), data_step(step, self._skipped), self._global_batch, self._seed)[self._rank :: self._world]
        batches, valid = _micro_batches(self._data, self._split, rows, self._count, self._micro_batch, self._document_mask, self._pin, self._stop)
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
        """Ends the threads; there is no next step after it."""
        self._stop.set()
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

    def made(number: int) -> MicroBatch:
        here = mine[number * micro_batch : (number + 1) * micro_batch]
        return _micro_batches(data, "eval", here, 1, micro_batch, document_mask)[0][0]

    with ThreadPoolExecutor(_EVAL_AHEAD, thread_name_prefix="eval") as readers:
        coming: deque[Future[MicroBatch]] = deque()
        for number in range(accumulation(len(chosen), micro_batch, world)):
            coming.append(readers.submit(made, number))
            if len(coming) > _EVAL_AHEAD:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
