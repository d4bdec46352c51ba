"""What `prepare` reads: finds the files behind a source, checks them early, and hands out their documents in order.

A text file is one document. In JSON lines, Parquet and a Hugging Face dataset on disk every row is one, its text in one
column. A file too large for one task is read in pieces; where it is cut depends on the file alone, so the result does too.
"""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from training.errors import BadInput
from training.storage import Place, place, redacted

STDLIB = "stdlib"
JSON_LINES = (".jsonl", ".json")
JSON_LINES_GZ = (".jsonl.gz", ".json.gz")
_NOT_STDLIB = frozenset(("site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"))

PIECE_BYTES = 8 * 2**20  # of a large file, per task: some seconds of work
GROUP_BYTES = 2 * 2**20  # of small files, per task: enough to make a task's overhead (some 10 ms) small
SEGMENT_CHARS = 2**18  # of a long document, per call of the tokenizer, which needs some 100 bytes of memory a token
_BLOCK = 4 * 2**20
_READERS = 8


@dataclasses.dataclass(frozen=True)
class File:
    """One file to read. ``source`` is the number of the source it belongs to, ``kind`` one of text, jsonl, jsonl.gz, parquet, arrow."""

    place: Place
    kind: str
    size: int
    source: int
    sha256: str = ""
    row_group_bytes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a file for one task: bytes [start, stop) of text and JSON lines, row groups [start, stop) of Parquet, else the whole file."""

    file: File
    start: int
    stop: int
    size: int


@dataclasses.dataclass(frozen=True)
class Fragment:
    """A document, or a part of a long one: ``ends`` is true on the last part. ``held_out`` documents are the eval split."""

    text: str
    held_out: bool
    ends: bool


def held_out(sha256: bytes, fraction: float) -> bool:
    """Whether the document with this SHA-256 of its UTF-8 text is held out; equal texts always fall on the same side."""
    return int.from_bytes(sha256[:8], "big") < fraction * 2**64


# Finding files


def find(sources: Sequence[str], suffixes: Sequence[str]) -> list[File]:
    """The files of every source, in the order of the sources and by path within one; empty files are left out.

    Raises BadInput for a source that is missing, can't be opened, or holds nothing to read.
    """
    files: list[File] = []
    for number, uri in enumerate(sources):
        try:
            found = list(_stdlib()) if uri == STDLIB else list(_behind(uri, suffixes))
        except OSError as error:
            raise BadInput(f"sources: {redacted(uri)}: can't be read ({_reason(error)})") from error
        files += [File(at, kind, size, number) for at, kind, size in found if size]
        if not found:
            raise BadInput(f"sources: {redacted(uri)}: no file in this folder ends in {', '.join(suffixes)}; name the endings you want in suffixes")
    if not files:
        raise BadInput(f"sources: {', '.join(map(redacted, sources))}: every file is empty; give files with text in them")
    return files


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else " ".join(str(error).split())


def kind_of(name: str) -> str:
    """How a file of this name is read."""
    if name.endswith(JSON_LINES_GZ):
        return "jsonl.gz"
    if name.endswith(JSON_LINES):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def _stdlib() -> Iterator[tuple[Place, str, int]]:
    root = place(sysconfig.get_paths()["stdlib"])
    tops = [item for item in root.children() if item.base_name not in _NOT_STDLIB]
    for top in tops:
        below = [top] if top.is_file else dataclasses.replace(root, path=top.path).children(recursive=True)
        for item in below:
            inside = item.path[len(root.path) :].split("/")
            if item.is_file and item.path.endswith(".py") and _NOT_STDLIB.isdisjoint(inside):
                yield dataclasses.replace(root, path=item.path), "text", item.size


def _behind(uri: str, suffixes: Sequence[str]) -> Iterator[tuple[Place, str, int]]:
    root = place(uri)
    info = root.info()
    if info.type == pafs.FileType.NotFound:
        raise BadInput(f"sources: {redacted(uri)}: no such file or folder; check the path")
    if info.type != pafs.FileType.Directory:
        yield root, kind_of(root.name), info.size
        return
    if (root / "dataset_dict.json").exists():
        splits = (root / "dataset_dict.json").read_json()["splits"]
        raise BadInput(f"sources: {redacted(uri)}: a dataset with the splits {', '.join(splits)}; name the one to use, for example {redacted(uri)}/{splits[0]}")
    if (root / "state.json").exists() and (root / "dataset_info.json").exists():
        yield from _saved_dataset(root)
        return
    for item in root.children(recursive=True):
        inside = item.path[len(root.path) :].strip("/").split("/")
        hidden = any(part.startswith(".") or part == "__pycache__" for part in inside)
        if item.type != pafs.FileType.Directory and not hidden and item.path.endswith(tuple(suffixes)):
            yield dataclasses.replace(root, path=item.path), kind_of(item.base_name), item.size


def _saved_dataset(root: Place) -> Iterator[tuple[Place, str, int]]:
    state = (root / "state.json").read_json()
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise BadInput(f"sources: {root}: this dataset is a selection over other rows; call flatten_indices() on it and save it again")
    for entry in state["_data_files"]:
        file = root / entry["filename"]
        info = file.info()
        if info.type == pafs.FileType.NotFound:
            raise BadInput(f"sources: {file}: the dataset's state.json names this file but it is missing; save the dataset again")
        yield file, "arrow", info.size


# Checking them before the long work


def checked(files: Sequence[File], column: str, progress: Callable[[int], None]) -> list[File]:
    """The files with their SHA-256 (and the sizes of Parquet's row groups), read once from end to end.

    ``progress`` is told the bytes of each file when it is done. Raises BadInput, naming the file, for one that can't be read, is not
    UTF-8, is not what its ending says, or lacks the text column.
    """
    result: list[File] = []
    with ThreadPoolExecutor(_READERS) as readers:
        try:
            for file in readers.map(lambda file: _checked(file, column), files):
                result.append(file)
                progress(file.size)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise
    return result


def _checked(file: File, column: str) -> File:
    try:
        digest = hashlib.sha256()
        decoder = codecs.getincrementaldecoder("utf-8")() if file.kind in ("text", "jsonl") else None
        for block in _blocks(file.place, 0, file.size):
            digest.update(block)
            if decoder:
                decoder.decode(block)
        if decoder:
            decoder.decode(b"", final=True)
        groups = _check_columns(file, column)
    except UnicodeDecodeError as error:
        raise BadInput(f"{file.place}: not UTF-8 text ({error.reason}); convert it, or leave it out by naming other suffixes") from error
    except (OSError, pyarrow.ArrowException) as error:
        raise BadInput(f"{file.place}: {_unreadable(file, error)}") from error
    return dataclasses.replace(file, sha256=digest.hexdigest(), row_group_bytes=groups)


def _unreadable(file: File, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return f"can't be read ({_reason(error)})"
    return f"can't be read as {file.kind} ({' '.join(str(error).split())})"


def _blocks(at: Place, start: int, stop: int) -> Iterator[bytes]:
    if start == 0:
        with at.fs.open_input_stream(at.path) as stream:
            while stop > 0 and (block := stream.read(min(_BLOCK, stop))):
                stop -= len(block)
                yield block
        return
    with at.fs.open_input_file(at.path) as stream:
        stream.seek(start)
        while start < stop and (block := stream.read(min(_BLOCK, stop - start))):
            start += len(block)
            yield block


def _check_columns(file: File, column: str) -> tuple[int, ...]:
    if file.kind == "parquet":
        with file.place.fs.open_input_file(file.place.path) as stream, pq.ParquetFile(stream) as parquet:
            _check_schema(file, parquet.schema_arrow, column)
            meta = parquet.metadata
            return tuple(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
    if file.kind == "arrow":
        with file.place.fs.open_input_stream(file.place.path) as stream, pyarrow.ipc.open_stream(stream) as reader:
            _check_schema(file, reader.schema, column)
    if file.kind.startswith("jsonl"):
        first = next((line for line in _lines(file, 0, file.size) if line.strip()), None)
        if first is not None:
            _text_of(file, first, column, "the first line")
    return ()


def _check_schema(file: File, schema: pyarrow.Schema, column: str) -> None:
    if column not in schema.names:
        raise BadInput(f"{file.place}: no column {column!r}; it has {', '.join(schema.names)}: name the one with the text in textColumn")
    kind = schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind)):
        raise BadInput(f"{file.place}: column {column!r} holds {kind}, not text; name another one in textColumn ({', '.join(schema.names)})")


def _lines(file: File, start: int, stop: int) -> Iterator[bytes]:
    pending: list[bytes] = []
    for block in _unpacked(file) if file.kind == "jsonl.gz" else _blocks(file.place, start, stop):
        *whole, rest = block.split(b"\n")
        for line in whole:
            yield b"".join([*pending, line])
            pending = []
        pending.append(rest)
    yield b"".join(pending)


def _unpacked(file: File) -> Iterator[bytes]:
    with file.place.fs.open_input_stream(file.place.path, compression="gzip") as stream:
        while block := stream.read(_BLOCK):
            yield block


def _text_of(file: File, line: bytes, column: str, where: str) -> str | None:
    try:
        row = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError too
        raise BadInput(f"{file.place}: {where} is not JSON ({error}); JSON lines hold one object a line") from error
    if isinstance(row, list):
        raise BadInput(f"{file.place}: {where} holds a list; write one object a line instead (jq -c '.[]' does it)")
    if not isinstance(row, dict):
        raise BadInput(f"{file.place}: {where} is no JSON object; JSON lines hold one object a line")
    if column not in row:
        raise BadInput(f"{file.place}: {where} has no {column!r}; it has {', '.join(row) or 'nothing'}: name the key with the text in textColumn")
    text = row[column]
    if text is not None and not isinstance(text, str):
        raise BadInput(f"{file.place}: {where}: {column!r} holds {type(text).__name__}, not text; name another key in textColumn")
    return text if text is None or text.isascii() else _without_lone_surrogates(text)


def _without_lone_surrogates(text: str) -> str:
    """JSON may escape half a surrogate pair, which no UTF-8 text can hold: it becomes U+FFFD, as browsers have it."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


# Cutting the work


def plan(files: Iterable[File]) -> list[list[Piece]]:
    """The work, in order, as groups of pieces: one group is one task. It depends on the files alone."""
    groups: list[list[Piece]] = []
    room = 0
    for piece in (piece for file in files for piece in _pieces(file)):
        if not groups or piece.size > room:
            groups.append([])
            room = GROUP_BYTES
        groups[-1].append(piece)
        room -= piece.size
    return groups


def _pieces(file: File) -> Iterator[Piece]:
    if file.kind in ("text", "jsonl"):
        cuts = [0, *_cuts(file), file.size]
        yield from (Piece(file, start, stop, stop - start) for start, stop in itertools.pairwise(cuts))
    elif file.kind == "parquet":
        start, size = 0, 0
        for number, group in enumerate(file.row_group_bytes):
            size += group
            if size >= PIECE_BYTES or number + 1 == len(file.row_group_bytes):
                yield Piece(file, start, number + 1, size)
                start, size = number + 1, 0
    else:
        yield Piece(file, 0, 0, file.size)


def _cuts(file: File) -> list[int]:
    """Where a large file is cut: after the first newline beyond each multiple of PIECE_BYTES."""
    cuts: list[int] = []
    if file.size <= PIECE_BYTES:
        return cuts
    with file.place.fs.open_input_file(file.place.path) as stream:
        target = PIECE_BYTES
        while target < file.size:
            stream.seek(target)
            position, at = target, -1
            while at < 0 and (block := stream.read(2**20)):
                at = block.find(b"\n")
                position += len(block) if at < 0 else at + 1
            if position >= file.size:
                break
            cuts.append(position)
            target = max(target + PIECE_BYTES, position)
    return cuts


# Reading documents


def fragments(piece: Piece, column: str, eval_fraction: float) -> Iterator[Fragment]:
    """The documents of a piece in order, long ones in segments; empty ones and nulls are left out.

    Raises BadInput, naming the file and the line, for what can't be read as a document.
    """
    file = piece.file
    try:
        if file.kind == "text":
            out = held_out(bytes.fromhex(file.sha256), eval_fraction)
            text = b"".join(_blocks(file.place, piece.start, piece.stop)).decode("utf-8")
            parts = segments(text)
            yield from (Fragment(part, out, ends=piece.stop == file.size and number + 1 == len(parts)) for number, part in enumerate(parts))
            return
        for text in _texts(piece, column):
            parts = segments(text)
            out = held_out(hashlib.sha256(text.encode()).digest(), eval_fraction)
            yield from (Fragment(part, out, ends=number + 1 == len(parts)) for number, part in enumerate(parts))
    except UnicodeDecodeError as error:
        raise BadInput(f"{file.place}: not UTF-8 text ({error.reason}); convert it, or leave it out") from error
    except (OSError, EOFError, pyarrow.ArrowException) as error:
        raise BadInput(f"{file.place}: {_unreadable(file, error)}") from error


def _texts(piece: Piece, column: str) -> Iterator[str]:
    if piece.file.kind.startswith("jsonl"):
        rows = _json_texts(piece, column)
    elif piece.file.kind == "parquet":
        rows = _parquet_texts(piece, column)
    else:
        rows = _arrow_texts(piece, column)
    return (text for text in rows if text)


def _json_texts(piece: Piece, column: str) -> Iterator[str | None]:
    file, offset = piece.file, piece.start
    for number, line in enumerate(_lines(file, piece.start, piece.stop), start=1):
        if line.strip():
            where = f"line {number}" if piece.start == 0 else f"the line at byte {offset}"
            yield _text_of(file, line, column, where)
        offset += len(line) + 1


def _parquet_texts(piece: Piece, column: str) -> Iterator[str | None]:
    at = piece.file.place
    with at.fs.open_input_file(at.path) as stream, pq.ParquetFile(stream, buffer_size=2**20, pre_buffer=False) as parquet:
        for batch in parquet.iter_batches(batch_size=256, row_groups=range(piece.start, piece.stop), columns=[column]):
            yield from batch.column(0).to_pylist()


def _arrow_texts(piece: Piece, column: str) -> Iterator[str | None]:
    at = piece.file.place
    with at.fs.open_input_stream(at.path) as stream, pyarrow.ipc.open_stream(stream) as reader:
        for batch in reader:
            yield from batch.column(column).to_pylist()


def segments(text: str) -> list[str]:
    """``text`` cut into parts of at most SEGMENT_CHARS, which tokenise to the same tokens as the whole where a line allows it.

    The best cut is after a line end between two visible characters: the patterns of the GPT-2, GPT-4, Qwen and Llama 3
    tokenizers never join across one. Without such a line the cut is after any line end, and without one of those, hard.
    """
    parts: list[str] = []
    start = 0
    while len(text) - start > SEGMENT_CHARS:
        stop = _cut_before(text, start + SEGMENT_CHARS // 2, start + SEGMENT_CHARS)
        parts.append(text[start:stop])
        start = stop
    return [*parts, text[start:]] if start < len(text) else parts


def _cut_before(text: str, low: int, high: int) -> int:
    any_line = 0
    at = text.rfind("\n", low, high)
    while at >= 0:
        any_line = any_line or at + 1
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
        at = text.rfind("\n", low, at)
    return any_line or high
