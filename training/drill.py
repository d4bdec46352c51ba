"""``python -m training.drill``: harms runs on purpose, on this machine, and says what each fault cost.

A run undisturbed, then the same run once a fault: a worker killed, a node that goes with notice (as a spot node does), the store away for a while,
the Ray head killed. Every run has Ray nodes of its own here, one a worker. Exit codes: 0 every run ended as the undisturbed one did, 2 bad input,
3 one did not, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from training import checks, faults, job, schema
from training.errors import EXIT_DONE, EXIT_TRAINING_FAILED, BadInput, JobError, TrainingFailed
from training.faults import HEAD, NOTICE, STORAGE, WORKER, Toll
from training.prepare import prepare
from training.prepare_settings import PrepareSettings
from training.record import RUN_FILE, read_run
from training.settings import Settings, load
from training.storage import Place, place

NOTICE_SECONDS = 10.0
"""From a notice to the node's end: far less than the two minutes of a spot notice, so that a short run lives to see it."""
LEG_SECONDS = 1800.0
POLL_SECONDS = 0.1
# Of Ray's processes: the environment variable that tells the drill's own, the title of a training worker, the label of a node.
MARK, RANK, LABEL = "TRAINING_DRILL", "ray::RayTrainWorker", "drill"


class Nodes:
    """A Ray cluster on this machine: a head without CPUs, and a node a worker. Nodes listen on the network, so whoever talks to them needs a token."""

    def __init__(self, workers: int, cpus: int) -> None:
        with socket.socket() as free:
            free.bind(("", 0))
            self.port = free.getsockname()[1]
        self.cpus, self.mark, self.count = cpus, secrets.token_hex(8), 0
        # Of its own: in the usual one the head's address would stay when it is killed, and every later Ray on this machine would ask for it.
        self.folder = tempfile.mkdtemp(prefix="drill-ray-")
        self.environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
        self.environment.pop("RAY_ADDRESS", None)
        try:
            self._start("--head", f"--port={self.port}", f"--temp-dir={self.folder}", "--num-cpus=0", "--include-dashboard=false")
            self.environment["RAY_ADDRESS"] = f"{_own_address()}:{self.port}"
            for _ in range(workers):
                self.add()
        except BaseException:  # an interrupt, too, must leave nothing running
            self.kill()
            raise

    def add(self) -> None:
        """One node more."""
        self._start(f"--address={self.environment['RAY_ADDRESS']}", f"--num-cpus={self.cpus}")

    def _start(self, *arguments: str) -> None:
        marked = {**self.environment, MARK: f"{self.mark}.{self.count}"}
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", f"--labels={LABEL}={self.count}", *arguments]
        done = subprocess.run(command, env=marked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            self.kill()
            raise TrainingFailed(f"Ray could not start a node on this machine: {_last(done.stdout)}")
        self.count += 1

    def processes(self, node: int | None = None, title: str = "") -> list[int]:
        """Process ids of a node (None: of all), of those whose title begins so; they inherit the node's mark."""
        wanted = f"{MARK}={self.mark}.{'' if node is None else node}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                marks = [value for value in (folder / "environ").read_bytes().split(b"\0") if value.startswith(wanted)]
                if marks and (node is None or wanted in marks) and (folder / "cmdline").read_bytes().startswith(title.encode()):
                    found.append(int(folder.name))
        return sorted(found)

    def drain(self, node: int, seconds: float) -> None:
        """Tells Ray that the node goes; Ray itself does nothing to it."""
        code = f"import ray; ray.init(logging_level='ERROR'); print(*[n['NodeID'] for n in ray.nodes() if n['Labels'].get('{LABEL}') == '{node}'])"
        asked = subprocess.run([sys.executable, "-c", code], env=self.environment, capture_output=True, text=True, check=False)
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.environment["RAY_ADDRESS"], "--node-id", asked.stdout.strip()]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "drill", "--deadline-remaining-seconds", str(round(seconds))]
        done = subprocess.run(command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise TrainingFailed(f"Ray refused to drain a node: {_last(asked.stderr + done.stdout)}")

    def kill(self, node: int | None = None) -> None:
        """Ends a node's processes, or all, at once, as if the machine were gone."""
        while pids := self.processes(node):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        if node is None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def drill(settings: Settings, kinds: Sequence[str], seed: int, away: float, say: Callable[[str], None]) -> list[Toll]:
    """Runs ``settings`` undisturbed and once with each fault of ``kinds``. away: seconds that the store is gone. Raises JobError."""
    storage = place(settings.storage)
    if STORAGE in kinds and not storage.local:
        raise BadInput(f"storage = {settings.storage}: only a folder can be taken away here; leave `storage` out of --faults, or drill a stack: `ops drill`")
    stamp = f"drill-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    began = time.monotonic()

    def tell(text: str) -> None:
        say(f"[{time.monotonic() - began:4.0f} s] {text}")

    def named(name: str) -> Settings:
        return dataclasses.replace(settings, run=f"{stamp}-{name}", log_every=1, stop_after=None, export=False)

    tell(f"undisturbed: {settings.steps} steps on {settings.workers} workers")
    calm = _leg(named("none"), storage, None, 0, seed, away, tell)
    undisturbed = read_run(calm)
    tolls = []
    for kind in kinds:
        at = faults.strike_at(settings.steps, settings.checkpoint_every, seed, kind)
        tell(f"{faults.MEANINGS[kind]}, after step {at}")
        folder = _leg(named(kind), storage, kind, at, seed, away, tell)
        verdict = None
        with contextlib.suppress(FileNotFoundError):
            verdict = (folder / "verdict.json").read_json()
        tolls.append(faults.toll(kind, at, read_run(folder), verdict, undisturbed))
        tell("  " + ("ended as the undisturbed run did" if tolls[-1].survived else f"did NOT end as the undisturbed run: {tolls[-1].outcome} {tolls[-1].said}"))
        (calm / RUN_FILE).write_json({**undisturbed[0], "drill": faults.as_json(tolls)})
    return tolls


def _leg(settings: Settings, storage: Place, kind: str | None, at: int, seed: int, away: float, tell: Callable[[str], None]) -> Place:
    """One run to its end, struck by ``kind`` after step ``at``; returns its folder."""
    assert settings.run is not None
    folder = storage / settings.run
    end = time.monotonic() + LEG_SECONDS
    dice = random.Random(f"{seed}/{kind}")
    with tempfile.TemporaryDirectory(prefix="drill-") as scratch:
        file, log = Path(scratch) / "job.json", Path(scratch) / "log"
        file.write_text(json.dumps(schema.as_mapping(settings)))
        with _started(settings, file, log) as (nodes, process):
            if kind is not None:
                _until(lambda: _steps_done(folder) >= at or process.poll() is not None, end, f"step {at}")
                if process.poll() is not None:
                    raise TrainingFailed(f"the run ended before it could be harmed: {_last(log.read_text(errors='replace'))}")
                _strike(kind, nodes, folder, dice, away, tell, lambda: process.poll() is not None)
            if kind != HEAD:
                _until(lambda: process.poll() is not None, end, "the run's end")
        if kind == HEAD:
            tell("  a new head; the same command again")
            with _started(settings, file, log) as (_, process):
                _until(lambda: process.poll() is not None, end, "the run's end")
        if kind is None and process.returncode:
            raise TrainingFailed(f"the run ended with exit code {process.returncode} though nobody harmed it: {_last(log.read_text(errors='replace'))}")
    return folder


@contextlib.contextmanager
def _started(settings: Settings, file: Path, log: Path) -> Iterator[tuple[Nodes, subprocess.Popen[bytes]]]:
    """The job under way on Ray nodes of its own; both are gone afterwards."""
    with contextlib.ExitStack() as afterwards:
        nodes = Nodes(settings.workers, settings.cpus_per_worker)
        afterwards.callback(nodes.kill)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "training.job", "--config", str(file), "--launcher", "ray"],
                env={**nodes.environment, "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        afterwards.enter_context(process)
        afterwards.callback(process.kill)
        yield nodes, process


def _strike(kind: str, nodes: Nodes, folder: Place, dice: random.Random, away: float, tell: Callable[[str], None], over: Callable[[], bool]) -> None:
    if kind == WORKER:
        os.kill(dice.choice(nodes.processes(title=RANK)), signal.SIGKILL)
    elif kind == NOTICE:
        node = dice.randrange(1, nodes.count)
        end = time.monotonic() + NOTICE_SECONDS
        nodes.drain(node, NOTICE_SECONDS)
        nodes.add()  # where the run may go on
        time.sleep(max(0.0, end - time.monotonic()))
        if over():
            raise TrainingFailed(f"the run ended before the node went; give it more steps (--set steps=...) than {NOTICE_SECONDS:.0f} s hold")
        nodes.kill(node)
    elif kind == STORAGE:
        there = Path(folder.path) / "checkpoints"
        kept = there.with_name("checkpoints-away")
        there.rename(kept)
        there.touch()  # a file where a folder was: whatever is written there fails
        try:
            time.sleep(away)
        finally:
            there.unlink()
            kept.rename(there)
        tell(f"  it is back after {away:.0f} s")
    else:
        nodes.kill()


def _steps_done(folder: Place) -> int:
    """Steps that the run has logged so far."""
    try:
        _, metrics = read_run(folder)
    except BadInput:  # not there yet
        return 0
    return max((int(line["step"]) for line in metrics), default=0)


def _until(found: Callable[[], bool], end: float, what: str) -> None:
    while not found():
        if time.monotonic() > end:
            raise TrainingFailed(f"{what} was not seen within {LEG_SECONDS / 60:.0f} minutes")
        time.sleep(POLL_SECONDS)


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def example(folder: Path, say: Callable[[str], None]) -> Settings:
    """A job small enough for two cores: some of this Python's own sources, a tiny model, two workers."""
    data = folder / "data"
    text = [str(Path(sysconfig.get_paths()["stdlib"]) / package) for package in ("asyncio", "email", "json", "logging")]
    source: dict[str, Any] = {"sources": text, "output": str(data), "tokenizer": "train:512", "sequenceLength": 128, "evalFraction": 0.05}
    prepare(schema.parse(PrepareSettings, source, "drill"), say)
    values = {"data": str(data), "storage": str(folder / "runs"), "model": {"random": "tiny"}, "workers": 2, "steps": 400, "tokensPerStep": 2048}
    return schema.parse(Settings, {**values, "checkpointEvery": 20, "warmupSteps": 10, "learningRate": 1e-3, "evalRows": 16}, "drill")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m training.drill", description=(__doc__ or "").split("\n\n", 1)[1], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="settings of the run, as for training.job (default: a tiny model on Python's own sources)")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="one setting, over the file's; may be repeated")
    parser.add_argument("--faults", default=",".join(faults.FAULTS), help="which, in this order (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides when each strikes, and whom (default: 0)")
    parser.add_argument("--away", type=float, default=60.0, metavar="SECONDS", help="how long the store is away (default: 60)")
    parser.add_argument("--folder", default="drill", help="where the example's data and runs go (default: drill)")
    arguments = parser.parse_args(argv)

    def say(text: str) -> None:
        print(text, flush=True)  # noqa: T201

    try:
        kinds = faults.chosen(arguments.faults)
        if arguments.config:
            settings = load(arguments.config, arguments.set)
        else:
            raw = schema.as_mapping(example(Path(arguments.folder).absolute(), say))
            settings = schema.parse(Settings, schema.apply_overrides(raw, arguments.set), "--set")
        settings = job.absolute(settings)
        checks.check(settings)
        tolls = drill(settings, kinds, arguments.seed, arguments.away, say)
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted; the runs that were under way are stopped")
        return job.EXIT_INTERRUPTED
    say("")
    for line in faults.as_text(tolls):
        say(line)
    return EXIT_DONE if all(found.survived for found in tolls) else EXIT_TRAINING_FAILED


if __name__ == "__main__":
    sys.exit(main())
