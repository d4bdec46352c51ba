"""Finds a run by what a person calls it, and reads its record: from a folder, from S3, or through the head of a stack's Ray cluster."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ops import target
from ops.aws import Aws, AwsError
from ops.errors import BadInput
from ops.inside import Inside
from training.record import read_run

FILES = ("run.json", "metrics.jsonl", "verdict.json")
# Run names as training/settings.py makes them; what goes to a pod as an argument is one of these.
NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
# Any storage that the image's pyarrow opens, the stack's own keys included; one answer with all files, so that they are of one moment.
_READER = """
import base64, json, sys
import pyarrow.fs as fs
found = {}
at, path = fs.FileSystem.from_uri(sys.argv[1])
for name in sys.argv[2:]:
    try:
        with at.open_input_stream(path.rstrip("/") + "/" + name) as stream:
            found[name] = base64.b64encode(stream.read()).decode()
    except FileNotFoundError:
        pass
print(json.dumps(found))
"""
# Adds to the run.json of a run that is over; argv: the run's URI, a JSON mapping.
NOTER = """
import json, sys
import pyarrow.fs as fs
at, path = fs.FileSystem.from_uri(sys.argv[1])
name = path.rstrip("/") + "/run.json"
with at.open_input_stream(name) as stream:
    document = json.loads(stream.read())
with at.open_output_stream(name) as stream:
    stream.write((json.dumps({**document, **json.loads(sys.argv[2])}, indent=2) + "\\n").encode())
"""
_LISTER = """
import json, sys
import pyarrow.fs as fs
at, path = fs.FileSystem.from_uri(sys.argv[1])
found = at.get_file_info(fs.FileSelector(path, allow_not_found=True))
print(json.dumps(sorted(entry.base_name for entry in found if entry.type == fs.FileType.Directory)))
"""


@dataclasses.dataclass(frozen=True)
class _Files:
    """The files of a run in memory, with what training.record.read_run asks of a place."""

    where: str
    files: Mapping[str, bytes]
    name: str = ""

    def __truediv__(self, name: str) -> _Files:
        return dataclasses.replace(self, name=name)

    def __str__(self) -> str:
        return f"{self.where}/{self.name}".rstrip("/")

    def read_bytes(self) -> bytes:
        if self.name not in self.files:
            raise FileNotFoundError(str(self))
        return self.files[self.name]

    def read_json(self) -> Any:
        return json.loads(self.read_bytes())


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's record. document: run.json. metrics: lines of metrics.jsonl in order of step. verdict: verdict.json, None where the gate never judged.

    usd_hour: the list price of the stack it ran on, where it was found through one that is up.
    """

    name: str
    where: str
    document: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]
    verdict: Mapping[str, Any] | None
    usd_hour: float | None = None


def find(run: str, folder: Path | None = None) -> Run:
    """A run by its folder, its s3:// URI, STACK (its newest job's run) or STACK/RUN. Raises BadInput where there is none."""
    if run.startswith("s3://"):
        return _read(run, _from_s3(run.rstrip("/"), Aws(None)))
    if "://" in run:
        raise BadInput(f"{run}: this command reads folders and s3://; or give STACK/RUN, which reads through the stack's own pods")
    here = Path(run).expanduser()
    if here.is_dir():
        return _read(str(here), {name: (here / name).read_bytes() for name in FILES if (here / name).is_file()})
    stack, _, name = run.partition("/")
    if stack in target.known(folder):
        return of_stack(stack, name or None, folder)
    raise BadInput(f"{run}: no folder, no s3:// URI, and no stack; give a run's folder, s3://bucket/runs/NAME, STACK or STACK/RUN")


def of_stack(stack: str, name: str | None, folder: Path | None = None) -> Run:
    """A run of a stack that is up; without a name its newest job's."""
    from ops.stack import Stack

    found = Stack(stack, folder)
    if name is not None and not NAME.fullmatch(name):
        raise BadInput(f"{name!r} is no name of a run")
    with found.inside() as inside:
        if name is None:
            name = inside.run_name()
        if name is None:
            raise BadInput(f"the job of stack {stack} has not named its run yet; `python -m ops logs {stack}` shows how far it is")
        return read(found.target, inside, name, stack)


def uri_of(inside: Inside, name: str) -> str:
    """Where a run of the stack lies, as the pods name it."""
    return f"{inside.storage}/{name}" if "?" not in inside.storage else inside.storage.replace("?", f"/{name}?", 1)


def read(of: target.Target, inside: Inside, name: str, stack: str) -> Run:
    """A run of a stack that is up. Raises BadInput where there is none of that name."""
    uri = uri_of(inside, name)
    if uri.startswith("s3://") and "?" not in uri:
        files = _from_s3(uri, Aws(of.region, of.profile))
    else:
        answer = json.loads(inside.in_head(["python", "-c", _READER, as_uri(uri), *FILES]))
        files = {key: base64.b64decode(value) for key, value in answer.items()}
    if "run.json" not in files:
        there = ", ".join(json.loads(inside.in_head(["python", "-c", _LISTER, as_uri(inside.storage)]))) if "?" in uri or uri.startswith("/") else ""
        raise BadInput(f"{stack} has no run {name!r}" + (f"; there are {there}" if there else ""))
    return dataclasses.replace(_read(f"{stack}/{name}", files), usd_hour=inside.usd_hour)


def as_uri(place: str) -> str:
    """A place as pyarrow's from_uri takes it."""
    return f"file://{place}" if place.startswith("/") else place


def _from_s3(uri: str, aws: Aws) -> dict[str, bytes]:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    files: dict[str, bytes] = {}
    for name in FILES:
        try:
            files[name] = aws.ask("s3", "get_object", Bucket=bucket, Key=f"{prefix}/{name}")["Body"].read()
        except AwsError as error:
            if error.code not in ("NoSuchKey", "404"):
                raise
    return files


def _read(where: str, files: Mapping[str, bytes]) -> Run:
    place = _Files(where, files)
    document, metrics = read_run(cast(Any, place))
    verdict = None
    if "verdict.json" in files:
        try:
            verdict = json.loads(files["verdict.json"])
        except ValueError as error:
            raise BadInput(f"{where}/verdict.json: not valid JSON ({error}); it was not written by this program") from error
    return Run(str(document.get("run") or where), where, document, tuple(metrics), verdict)
