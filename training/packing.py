"""From documents to rows: a stream of tokens, cut into files while it is written and into rows while it is read.

A split is one stream: every document followed by the end-of-text token (EOS), in order. Row i of length L is tokens
[i*L, i*L + L + 1) of it: the first L are the input, the last L the labels. So every token but the first of the stream
is a label exactly once, nothing is padded, and only the tail that fills no row is dropped.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
from collections.abc import Iterable
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from training.errors import TrainingFailed
from training.storage import Place

IGNORED = -100  # the label that every loss of PyTorch and transformers skips
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of a split's stream: little-endian unsigned integers and nothing else."""

    file: str
    tokens: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Split:
    """One stream: its files in order, and what they hold. ``sha256`` is that of the whole stream, however it is cut into files."""

    shards: tuple[Shard, ...]
    tokens: int
    rows: int
    documents: int
    dropped: int
    sha256: str


def rows_in(tokens: int, sequence_length: int) -> int:
    """Whole rows in a stream of so many tokens; the last label of a row is the first input of the next."""
    return max(0, (tokens - 1) // sequence_length)


def dropped_from(tokens: int, sequence_length: int) -> int:
    """Tokens at the end of the stream that are in no row."""
    rows = rows_in(tokens, sequence_length)
    return tokens - (rows * sequence_length + 1) if rows else tokens


def joined(parts: Iterable[tuple[npt.ArrayLike, bool]], eos: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The stream of ``parts``: the token ids of each, then EOS where the part is the end of its document."""
    pieces: list[npt.NDArray[Any]] = []
    for ids, ends in parts:
        pieces.append(np.asarray(ids, dtype=dtype))
        if ends:
            pieces.append(np.array([eos], dtype=dtype))
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=dtype)


def token_dtype(vocab_size: int) -> str:
    """The smallest of uint16 and uint32 that holds every token id."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


def little_endian(dtype: str) -> np.dtype[Any]:
    """How ``dtype`` lies in a shard, on every machine."""
    return np.dtype(dtype).newbyteorder("<")


def cut(rows: npt.NDArray[np.int64], eos: int, document_mask: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
    """Rows [B, L+1] as (inputs [B, L], labels [B, L], positions [B, L] or None).

    With ``document_mask`` positions restart at 0 after each EOS, and the label there, which would ask a document to
    predict the first token of the next one, is -100.
    """
    inputs, labels = rows[:, :-1], rows[:, 1:]
    if not document_mask:
        return inputs, labels, None
    ends = inputs == eos
    starts = np.zeros_like(ends)
    starts[:, 1:] = ends[:, :-1]
    place = np.arange(inputs.shape[1], dtype=np.int64)
    latest_start = np.maximum.accumulate(np.where(starts, place, 0), axis=1)
    return inputs, np.where(ends, IGNORED, labels), place - latest_start


class ShardWriter:
    """Writes one split's stream into ``<split>-00000.bin``, ``-00001.bin``, ... of at most ``shard_tokens`` tokens each.

    Memory does not grow with the stream. A full disk, or any other failure to write, raises TrainingFailed.
    """

    def __init__(self, folder: Place, split: str, dtype: str, shard_tokens: int, sequence_length: int) -> None:
        self._folder, self._split, self._shard_tokens, self._sequence_length = folder, split, shard_tokens, sequence_length
        self._dtype = little_endian(dtype)
        self._file: IO[bytes] | None = None
        self._in_file = 0
        self._file_hash = hashlib.sha256()
        self._stream_hash = hashlib.sha256()
        self._shards: list[Shard] = []
        self.tokens = 0
        self.documents = 0

    def write(self, tokens: npt.NDArray[Any], documents: int) -> None:
        """Appends ``tokens``, in which so many documents end."""
        try:
            self._write(np.ascontiguousarray(tokens, dtype=self._dtype))
        except OSError as error:
            raise self._told(error) from error
        self.documents += documents

    def _write(self, tokens: npt.NDArray[Any]) -> None:
        while tokens.size:
            if self._file is None:
                self._file, self._in_file, self._file_hash = self._open(), 0, hashlib.sha256()
            part, tokens = np.split(tokens, [self._shard_tokens - self._in_file])
            data = part.tobytes()
            self._file.write(data)
            self._file_hash.update(data)
            self._stream_hash.update(data)
            self._in_file += part.size
            self.tokens += part.size
            if self._in_file == self._shard_tokens:
                self._finish_file()

    def _name(self) -> str:
        return f"{self._split}-{len(self._shards):05d}.bin"

    def _open(self) -> IO[bytes]:
        target = self._folder / self._name()
        if target.local:
            return open(target.path, "wb")
        return cast(IO[bytes], target.fs.open_output_stream(target.path))

    def _finish_file(self) -> None:
        assert self._file is not None
        if self._folder.local:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        self._shards.append(Shard(self._name(), self._in_file, self._file_hash.hexdigest()))
        self._file = None

    def _told(self, error: OSError) -> TrainingFailed:
        reason = os.strerror(error.errno) if error.errno else " ".join(str(error).split())
        what = "no room to write on" if error.errno in NO_ROOM else "can't be written"
        way_out = "free some space or give another output" if error.errno in NO_ROOM else "mend that or give another output"
        return TrainingFailed(
            f"{self._folder / self._name()}: {what} ({reason}) after {self.tokens:,} tokens of the {self._split} split;"
            f" {way_out}, then start again (nothing of this attempt counts)"
        )

    def finish(self) -> Split:
        """Closes the last file and says what was written."""
        try:
            if self._file is not None:
                self._finish_file()
        except OSError as error:
            raise self._told(error) from error
        length = self._sequence_length
        return Split(
            tuple(self._shards), self.tokens, rows_in(self.tokens, length), self.documents, dropped_from(self.tokens, length), self._stream_hash.hexdigest()
        )

    def abandon(self) -> None:
        """Closes the open file after a failure, without claiming that it is whole."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
