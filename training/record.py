"""What a run leaves behind: ``run.json`` (what ran, where, how it ended) and ``metrics.jsonl`` (a line per logged step).

One process writes: rank 0 of the attempt that is running. Reading needs neither torch nor Ray.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from training.errors import BadInput, TrainingFailed
from training.schema import file_key

if TYPE_CHECKING:  # pyarrow, which a reader with files of its own need not have
    from training.storage import Place

SCHEMA = 1
RUN_FILE, METRICS_FILE = "run.json", "metrics.jsonl"
# preempted: its host was taken away after a notice; resized: ended to go on with more workers; interrupted: by SIGTERM. All three after a checkpoint.
OUTCOMES = ("running", "done", "stopped", "failed", "preempted", "resized", "interrupted")
# A rank that takes a fifth longer for a step than the median one costs the whole run a sixth of its speed: it is told of.
NOTABLE_RATIO = 1.2
# An object can't be appended to, only written anew; oftener than this would cost more requests than anyone reads.
REWRITE_EVERY_SECONDS = 30.0
# After a refusal the next try waits, each time twice as long: while one is made, training waits too.
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_USER_INFO = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@")


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """A logged step. Rates and times are means over the steps since the last line; None: not known."""

    step: int
    """Optimizer steps done."""
    loss: float
    """Mean cross-entropy of a token, nats."""
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    tokens: int
    """Tokens trained on since the run's first step."""
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    step_seconds: float
    data_wait: float
    """Seconds of a step in which the loop waited for data."""
    mfu: float | None = None
    """0 to 1, attention counted as causal."""
    exposed_communication: float | None = None
    """Seconds of a step in which the GPU waited for communication."""
    memory_gib: float | None = None
    """Peak memory PyTorch allocated, GiB, on rank 0's device."""


def now() -> str:
    """The time as ISO 8601 in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def code_hash(folder: Path | None = None) -> str:
    """SHA-256 over names and contents of the .py files of this package (or of ``folder``), in order of name."""
    root = folder or Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def versions(nccl: str | None = None) -> dict[str, str | None]:
    """Versions of what computes the result; None for what is not installed. ``nccl``: as torch.cuda.nccl.version() reports it."""

    def installed(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {"python": platform.python_version(), **{name: installed(name) for name in ("torch", "ray", "transformers")}, "nccl": nccl}


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it: floats without a JSON number (a loss that diverged) by name, and user:password@ in URIs struck out.

    The record is read by more people than may use the storage.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        return _USER_INFO.sub("***@", value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _document(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _line(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(_plain(values), allow_nan=False) + "\n").encode()


def _parsed(line: bytes) -> dict[str, Any]:
    values = json.loads(line)
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise ValueError("no mapping with a step")
    return {key: _NOT_FINITE.get(value, value) if isinstance(value, str) else value for key, value in values.items()}


def _read_metrics(place: Place) -> list[dict[str, Any]]:
    try:
        lines = place.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{place}: can't be read ({error})") from error
    metrics = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            metrics.append(_parsed(line))
        except ValueError as error:
            if number == len(lines):  # the writer was stopped in the middle of it
                break
            raise BadInput(f"{place} line {number}: not a line of metrics; remove it, or the whole file, and start again") from error
    return metrics


def read_run(run_place: Place) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """``run.json`` and the lines of ``metrics.jsonl`` (in order of step; training lines have ``loss``, evaluations ``evalLoss``).

    A torn last line is left out. Raises BadInput where the place holds no readable run.
    """
    try:
        run = (run_place / RUN_FILE).read_json()
    except FileNotFoundError as error:
        raise BadInput(f"{run_place}: no run here ({RUN_FILE} is missing); give the folder of a run, storage/run-name") from error
    except OSError as error:
        raise BadInput(f"{run_place}: can't be read ({error})") from error
    except ValueError as error:
        raise BadInput(f"{run_place / RUN_FILE}: not valid JSON ({error}); it was not written by this program") from error
    if not isinstance(run, dict) or run.get("schema") != SCHEMA:
        found = run.get("schema") if isinstance(run, dict) else None
        raise BadInput(f"{run_place / RUN_FILE}: schema {found!r} where {SCHEMA} is expected; read it with the version that wrote it")
    return run, _read_metrics(run_place / METRICS_FILE)


def refuse_another(run_place: Place, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The ``run.json`` that is already here, or None. Raises BadInput, naming what differs, where it is of a run with another identity."""
    if not (run_place / RUN_FILE).exists():
        return None
    run, _ = read_run(run_place)
    before, after = run.get("identity", {}), _plain(identity)
    different = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    if different:
        listed = "; ".join(f"{key} was {before.get(key)!r}, is {after.get(key)!r}" for key in different)
        raise BadInput(f"{run_place} holds another run: {listed}. Give this one another name (run: ...), or the settings it was started with to resume it")
    return run


class RunRecord:
    """The record of one attempt at a run. Made by :func:`open_run`; nothing is written before :meth:`start`.

    What storage refuses is kept here and written later, in order; after ``patience`` seconds of refusals TrainingFailed is raised. Only
    :meth:`close` waits.
    """

    def __init__(
        self,
        run_place: Place,
        document: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
        patience: float = 0.0,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.place = run_place
        self._document = document
        self._clock = clock
        self._patience, self._say = patience, say
        self._lines: list[bytes] = []
        self._files: dict[str, bytes] = {}  # whole files that are still to be written, the newest content of each
        self._file: IO[bytes] | None = None
        self._kept, self._bytes = 0, 0  # lines that are in metrics.jsonl, and its length with them
        self._written = clock()
        self._refused_since: float | None = None
        self._pause, self._retry_at = 0.0, 0.0
        self._closed = False
        self.attempt = 0
        """Number of this attempt, from 1; 0 before :meth:`start`."""

    def start(self, start_step: int, world_size: int, hosts: Sequence[str]) -> None:
        """Begins an attempt that goes on after ``start_step`` (0: from the beginning).

        Lines of earlier attempts beyond ``start_step`` are dropped, for those steps are done again and the curve must go on from there.
        """
        lines = _read_metrics(self.place / METRICS_FILE)
        for attempt in self._document["attempts"]:
            if attempt["outcome"] == "running":  # its process was gone before it could say so
                of_it = [line for line in lines if line.get("attempt") == attempt["number"]]
                notice = attempt.get("notice") or {"outcome": "lost", "reason": "ended without a word (killed, or its host was lost)"}
                attempt |= {
                    "outcome": notice["outcome"],
                    "ended": of_it[-1]["time"] if of_it else attempt["started"],
                    "endStep": max(of_it[-1]["step"] if of_it else attempt["startStep"], notice.get("step", 0)),
                    "reason": notice["reason"],
                }
            if attempt is self._document["attempts"][-1] and attempt["worldSize"] != world_size and attempt["outcome"] not in ("done", "stopped"):
                attempt["reason"] = f"{attempt['reason']}; the run went on with {world_size} worker{'s' if world_size > 1 else ''} for {attempt['worldSize']}"
        self.attempt = len(self._document["attempts"]) + 1
        self._document["attempts"].append(
            {
                "number": self.attempt,
                "started": now(),
                "ended": None,
                "outcome": "running",
                "worldSize": world_size,
                "hosts": list(hosts),
                "startStep": start_step,
                "endStep": None,
                "reason": None,
            }
        )
        self._document |= {"outcome": "running", "ended": None, "hosts": list(hosts)}
        self._lines, self._kept = [_line(line) for line in lines if line["step"] <= start_step], -1
        self._save()

    def log(self, metrics: StepMetrics) -> None:
        """Adds a training line."""
        known = {name: value for name, value in dataclasses.asdict(metrics).items() if value is not None}
        self._add({file_key(name).replace("Gib", "GiB"): value for name, value in known.items()})

    def log_evaluation(self, step: int, loss: float) -> None:
        """Adds an evaluation line: mean cross-entropy of a held-out token (nats) after ``step`` steps, and the perplexity it means."""
        perplexity = math.exp(loss) if loss < 700 else math.inf
        self._add({"step": step, "evalLoss": loss, "perplexity": perplexity})

    def note(self, **values: Any) -> None:
        """Adds or replaces fields of run.json (in camelCase there), such as ``cost`` or ``plan``."""
        self._document |= {file_key(key): _plain(value) for key, value in values.items()}
        self._save()

    def rewind(self, step: int, rollback: Mapping[str, Any] | None = None) -> None:
        """Drops this run's lines beyond ``step``, for the run goes on from there; ``rollback`` (plain data) joins those in run.json.

        Without one the attempt itself begins there, earlier than :meth:`start` was told.
        """
        self._lines = [line for line in self._lines if json.loads(line)["step"] <= step]
        self._kept = -1
        if self._file is not None:
            self._file.close()
            self._file = None
        if rollback is None:
            self._document["attempts"][-1]["startStep"] = step
        else:
            self._document.setdefault("rollbacks", []).append(_plain(rollback))
        self._save()

    def expect(self, outcome: str, reason: str, **facts: Any) -> None:
        """Says beforehand how the attempt ends if its processes end without a word (see :data:`OUTCOMES`). ``facts`` are kept beside it."""
        named = {file_key(key): _plain(value) for key, value in facts.items()}
        self._document["attempts"][-1]["notice"] = {"outcome": outcome, "reason": reason, **named}
        self._save()

    def close(self, outcome: str, end_step: int, reason: str | None = None) -> None:
        """Ends the attempt after ``end_step`` steps: done, stopped (on purpose, before its last step), or another of :data:`OUTCOMES`.

        A second call does nothing.
        """
        if self._closed:
            return
        if outcome not in OUTCOMES[1:]:
            raise ValueError(f"outcome {outcome!r}: one of {OUTCOMES[1:]}")
        self._closed = True
        ended = now()
        self._document["attempts"][-1] |= {"ended": ended, "outcome": outcome, "endStep": end_step, "reason": reason}
        self._document |= {"ended": ended, "outcome": outcome}
        self._files[RUN_FILE] = self._run_file()
        self._write(last=True)
        while self._files or self._kept != len(self._lines):
            time.sleep(self._pause)
            self._write(last=True)
        if self._file is not None:
            self._file.close()

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON file beside run.json, or replaces it, with the patience that the record has."""
        self._files[name] = _document(value)
        self._write()

    def _add(self, values: Mapping[str, Any]) -> None:
        self._lines.append(_line({"step": values["step"], "time": now(), "attempt": self.attempt, **values}))
        self._write()

    def _save(self) -> None:
        self._files[RUN_FILE] = self._run_file()
        self._write()

    def _run_file(self) -> bytes:
        return _document(self._document)

    def _write(self, last: bool = False) -> None:
        """Writes what is waiting, the lines first. After a refusal not before the pause is over, unless it is the ``last`` time."""
        if self._refused_since is not None and not last and self._clock() < self._retry_at:
            return
        try:
            if self._kept < 0 or (not self.place.local and (last or self._clock() - self._written >= REWRITE_EVERY_SECONDS)):
                self._rewrite()
            elif self.place.local and self._kept < len(self._lines):
                self._append()
            for name in list(self._files):
                (self.place / name).write_bytes(self._files[name])
                del self._files[name]
        except OSError as error:
            self._refused(error)
        else:
            if self._refused_since is not None:
                self._refused_since, self._pause = None, 0.0
                self._say("storage takes the run's record again; nothing of it is lost")

    def _rewrite(self) -> None:
        lines = b"".join(self._lines)
        (self.place / METRICS_FILE).write_bytes(lines)
        self._kept, self._bytes = len(self._lines), len(lines)
        self._written = self._clock()

    def _append(self) -> None:
        try:
            if self._file is None:
                # Without a buffer: what is refused stays in self._lines, and nowhere else.
                self._file = open((self.place / METRICS_FILE).path, "ab", buffering=0)  # noqa: SIM115 (open for as long as the run)
                if os.fstat(self._file.fileno()).st_size < self._bytes:  # it was lost while storage was away
                    self._file.close()
                    self._file = None
                    self._rewrite()
                    return
                os.ftruncate(self._file.fileno(), self._bytes)  # a line that was cut off when it was refused
            new = memoryview(b"".join(self._lines[self._kept :]))
            size = self._bytes + len(new)
            while new:
                new = new[self._file.write(new) :]
        except OSError:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
                self._file = None
            raise
        self._kept, self._bytes = len(self._lines), size

    def _refused(self, error: OSError) -> None:
        at = self._clock()
        told = self._refused_since is not None
        since = self._refused_since if self._refused_since is not None else at
        left = since + self._patience - at
        if left <= 0:
            raise TrainingFailed(
                f"{self.place}: the run's record can't be written ({error}); make room or give access, and start the same run again"
            ) from error
        self._refused_since = since
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE, left)
        self._retry_at = at + self._pause
        if not told:
            self._say(
                f"the run's record can't be written to {self.place} now ({error}); it is kept in memory and tried again for {left:.0f} s (storagePatience)"
            )


def fail_for(run_place: Place, attempt: int, end_step: int, reason: str) -> None:
    """Ends the attempt as failed in place of its writer, whose process is stopped. Raises BadInput or OSError where the record can't be reached."""
    run, _ = read_run(run_place)
    entry = run["attempts"][attempt - 1]
    if entry["outcome"] != "running":
        return
    ended = now()
    entry |= {"ended": ended, "outcome": "failed", "endStep": end_step, "reason": _plain(reason)}
    (run_place / RUN_FILE).write_json({**run, "ended": ended, "outcome": "failed"})


def open_run(
    storage: Place,
    run: str,
    identity: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    nccl: str | None = None,
    clock: Callable[[], float] = time.monotonic,
    patience: float = 0.0,
    say: Callable[[str], None] = lambda _: None,
) -> RunRecord:
    """The record of ``run`` in ``storage``: a new one, or the one that is there, to be gone on with.

    identity: what makes two starts the same run (:func:`training.settings.identity`); settings: everything, as :func:`training.schema.as_mapping`
    gives it. Nothing is written before :meth:`RunRecord.start`. Raises BadInput where the folder holds a run of another identity.
    """
    run_place = storage / run
    before = refuse_another(run_place, identity)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "run": run,
        "settings": _plain(settings),
        "identity": _plain(identity),
        "versions": versions(nccl),
        "imageDigest": os.environ.get("RAY_TRAIN_IMAGE_DIGEST") or None,
        "codeHash": code_hash(),
        "hosts": [],
        "attempts": [],
        "started": now(),
        "ended": None,
        "outcome": "running",
        "cost": None,
    }
    if before is not None:
        document = {**before, **{key: document[key] for key in ("settings", "versions", "imageDigest", "codeHash")}}
    return RunRecord(run_place, document, clock, patience, say)
