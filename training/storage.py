"""One way to reach files, whether in a folder, on S3 or on anything else that pyarrow or fsspec knows by URI."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
import pyarrow.fs as pafs

from training.errors import BadInput

T = TypeVar("T")

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+)://")

# S3's client: seconds to connect, seconds without a byte before a request counts as dead, and how often a request is tried. pyarrow's own 1 s, 3 s
# and 3 give up on a store that says 503 after 0.7 s, and take the end of a large upload, which S3 may think about for seconds, for dead. Six tries
# last about 15 s (the pauses double), as long as S3 takes to spread a load it did not expect; what lasts longer is for the caller's patience.
PATIENT = (5.0, 20.0, 6)
# Where training itself waits for the answer, and what could not be written is kept and written later.
HASTY = (1.0, 3.0, 2)
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0


@dataclasses.dataclass(frozen=True)
class Place:
    """A file or folder: a pyarrow filesystem and the path in it. ``/`` goes down, as with pathlib."""

    fs: pafs.FileSystem
    path: str
    local: bool

    def __truediv__(self, name: str) -> Place:
        return dataclasses.replace(self, path=f"{self.path.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.path if self.local else f"{self.fs.type_name}://{self.path}"

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    def info(self) -> pafs.FileInfo:
        """Type and size. Raises OSError where the store can't be reached."""
        return self.fs.get_file_info(self.path)

    def exists(self) -> bool:
        """Whether there is a file or a folder here."""
        return bool(self.info().type != pafs.FileType.NotFound)

    def children(self, recursive: bool = False) -> list[pafs.FileInfo]:
        """What lies in this folder, sorted by path; nothing where there is no folder."""
        found = self.fs.get_file_info(pafs.FileSelector(self.path, allow_not_found=True, recursive=recursive))
        return sorted(found, key=lambda item: str(item.path))

    def make_folder(self) -> None:
        """Makes this folder and those above it."""
        self.fs.create_dir(self.path, recursive=True)

    def read_bytes(self) -> bytes:
        """The whole file. Raises FileNotFoundError."""
        with self.fs.open_input_stream(self.path) as stream:
            return bytes(stream.read())

    def write_bytes(self, data: bytes) -> None:
        """Writes the file so that a reader sees all of it or the one before: object stores do so by themselves, folders by a rename."""
        if not self.local:
            with self.fs.open_output_stream(self.path) as stream:
                stream.write(data)
            return
        target = Path(self.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    def read_json(self) -> Any:
        """The parsed JSON file. Raises FileNotFoundError, or ValueError where it is no JSON."""
        return json.loads(self.read_bytes())

    def write_json(self, value: Any) -> None:
        """As :meth:`write_bytes`, readable by a person."""
        self.write_bytes((json.dumps(value, indent=2, sort_keys=False) + "\n").encode())

    def delete(self) -> None:
        """Removes the file, or the folder with all in it; nothing happens where there is none."""
        kind = self.info().type
        if kind == pafs.FileType.Directory:
            self.fs.delete_dir(self.path)
        elif kind == pafs.FileType.File:
            self.fs.delete_file(self.path)


def place(uri: str, hasty: bool = False) -> Place:
    """The place that a person named by a path or URI; ``hasty``: one whose requests soon give up. Raises BadInput for a scheme that nothing here can open."""
    scheme = _SCHEME.match(uri)
    if not scheme:
        return Place(pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(uri)), local=True)
    try:
        fs, path = pafs.FileSystem.from_uri(uri)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, ValueError):
        fs, path = _through_fsspec(uri, scheme.group(1))
    except OSError as error:
        raise BadInput(f"{redacted(uri)}: can't be opened ({error})") from error
    if isinstance(fs, pafs.S3FileSystem):
        fs = _tuned(fs, *(HASTY if hasty else PATIENT))
    return Place(fs, path.rstrip("/") or "/", local=isinstance(fs, pafs.LocalFileSystem))


def _tuned(fs: pafs.S3FileSystem, connect: float, silence: float, attempts: int) -> pafs.S3FileSystem:
    """The same S3 with other limits. A URI can't name them; how the filesystem pickles itself tells everything it was made of, the bucket's region too."""
    _, (options,) = fs.__reduce__()
    limits = {"connect_timeout": connect, "request_timeout": silence, "retry_strategy": pafs.AwsStandardS3RetryStrategy(max_attempts=attempts)}
    # A small file is then one request, and there or not there, where it would else be three.
    return pafs.S3FileSystem(**{**options, **limits, "allow_delayed_open": True})


def patiently(work: Callable[[], T], seconds: float, say: Callable[[str], None], what: str) -> T:
    """``work()``, again and again for ``seconds`` while storage refuses it; then raises the OSError. A file that is not there is no refusal."""
    began, pause = time.monotonic(), FIRST_PAUSE
    while True:
        try:
            return work()
        except FileNotFoundError:
            raise
        except OSError as error:
            left = began + seconds - time.monotonic()
            if left <= 0:
                raise
            say(f"{what}: storage does not answer ({error}); it is asked again for {left:.0f} s")
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)


def _through_fsspec(uri: str, scheme: str) -> tuple[pafs.FileSystem, str]:
    import fsspec  # only for what pyarrow itself has no filesystem for

    try:
        fs, path = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError) as error:
        raise BadInput(f"{redacted(uri)}: nothing here opens {scheme}:// ({error}); use a folder or an s3:// URI") from error
    return pafs.PyFileSystem(pafs.FSSpecHandler(fs)), path


def redacted(uri: str) -> str:
    """The URI without credentials, as it may be shown and stored."""
    return re.sub(r"((?:access|secret|token|key|password)[a-z_]*=)[^&]+", r"\1***", re.sub(r"://[^/@]+@", "://***@", uri))


@contextlib.contextmanager
def as_local_folder(source: Place, scratch: str | None = None) -> Iterator[Path]:
    """A local folder with the files of ``source``: itself where it is local, else a copy that is removed afterwards."""
    if source.local:
        yield Path(source.path)
        return
    import tempfile

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        pafs.copy_files(source.path, folder, source_filesystem=source.fs)
        yield Path(folder)
