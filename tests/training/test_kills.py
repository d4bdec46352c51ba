"""SIGKILL at any point: what a run resumes from is whole, it never falls behind what it had, and it ends where the undisturbed run ends.

A rank tells through a pipe of whatever it is about to do to the run's files; whoever listens kills it at the n-th time it hears something, and the
kernel decides how far the rank has got by then. n comes from a seed. The long one: ``pytest tests/training/test_kills.py -m soak``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

from tests.training.pretended import Run, go, go_watched, listened
from tests.training.proxy import Fault, Proxy, Request, moto
from tests.training.ranks import _context, free_port, start_ranks
from tests.training.test_job import losses, settings
from training import checkpoint, schema
from training.storage import Place, place


def usable(folder: Place) -> list[int]:
    return sorted(found.step for found in checkpoint.find(folder) if found.torn is None)


def kill_at(events: Connection, count: int, victims: Callable[[], list[int]]) -> threading.Thread:
    """A thread that sends SIGKILL to ``victims()`` when ``count`` bytes have come through ``events``, or never if fewer come."""

    def listen() -> None:
        heard = 0
        while heard < count:
            data = os.read(events.fileno(), count - heard)
            if not data:
                return
            heard += len(data)
        for pid in victims():
            os.kill(pid, signal.SIGKILL)
        while os.read(events.fileno(), 4096):  # a survivor must not stand still before a full pipe
            pass

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    return thread


def ended(processes: list[Any]) -> bool:
    """Waits for all of them; whether any was killed. Those that are left behind by a killed one end by themselves: their connections break."""
    for process in processes:
        process.join(timeout=120)
        assert not process.is_alive(), "a rank whose partner was killed must not wait for it for ever"
    return any(process.exitcode == -signal.SIGKILL for process in processes)


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["sync", "async"])
def test_a_checkpoint_in_a_folder_is_usable_or_absent_wherever_its_writers_are_killed(tmp_path: Path, asynchronous: bool) -> None:
    folder, chance, newest, killed = place(str(tmp_path / "checkpoints")), random.Random(int(asynchronous)), 0, 0
    for attempt in range(1, 9):
        run = Run(str(tmp_path), steps=newest + 8, attempt=attempt, asynchronous=asynchronous)
        ours, theirs = _context.Pipe(duplex=False)
        processes, _ = start_ranks(2, go_watched, run, theirs)
        theirs.close()
        victims = [processes[chance.randrange(2)].pid] if chance.random() < 0.5 else [p.pid for p in processes]
        # Undisturbed, these steps are heard some 120 times; in the background half of the checkpoints are left out.
        listener = kill_at(ours, chance.randrange(1, 50 if asynchronous else 110), lambda victims=victims: victims)
        killed += ended(processes)
        listener.join()
        ours.close()
        now = usable(folder)
        assert max(now, default=0) >= newest, f"attempt {attempt}: {now} after step {newest} was safe"
        newest = max(now, default=0)
    assert killed >= 4, "most of the kills must have hit a running rank"
    processes, answers = start_ranks(1, go, Run(str(tmp_path), steps=newest + 2, attempt=9))
    _, result, error = answers.get(timeout=120)
    assert error is None, error[2]
    assert (result["start"], result["values"]) == (newest, {newest + 2.0})
    torn = [c.folder.name for c in checkpoint.find(folder) if c.torn and c.step <= newest + 2]
    assert torn == [], "what the kills left half-written goes once a whole one of that step or a later one is there"


@pytest.mark.soak
def test_a_checkpoint_on_s3_is_usable_or_absent_whichever_request_its_writers_are_killed_at(tmp_path: Path) -> None:
    chance, newest, killed = random.Random(5), 0, 0
    with moto(tmp_path) as server, Proxy(server) as proxy:
        fs = pafs.S3FileSystem(access_key="test", secret_key="test", endpoint_override=server, scheme="http", region="us-west-2", allow_bucket_creation=True)
        fs.create_dir("bucket")
        folder = Place(fs, "bucket/run/checkpoints", local=False)
        for attempt in range(1, 9):
            pids: list[int] = []
            ready = threading.Event()
            at, cut = len(proxy.requests) + chance.randrange(1, 90), chance.choice(["before", "after"])

            def fault(request: Request, at: int = at, cut: str = cut, pids: list[int] = pids, ready: threading.Event = ready) -> Fault | None:
                if request.number != at:
                    return None
                ready.wait()
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                return Fault(cut=cut)  # the server has done it or it has not; the killed one can't know

            proxy.fault = fault
            processes, _ = start_ranks(2, go, Run(proxy.uri("bucket/run"), steps=newest + 8, attempt=attempt, asynchronous=attempt % 2 == 0))
            pids += [p.pid for p in processes] if chance.random() < 0.5 else [processes[chance.randrange(2)].pid]
            ready.set()
            killed += ended(processes)
            now = usable(folder)
            assert max(now, default=0) >= newest, f"attempt {attempt}: {now} after step {newest} was safe"
            newest = max(now, default=0)
        proxy.fault = lambda _: None
        assert killed >= 4, "most of the kills must have hit a running rank"
        processes, answers = start_ranks(1, go, Run(proxy.uri("bucket/run"), steps=newest + 2, attempt=9))
        _, result, error = answers.get(timeout=120)
    assert error is None, error[2]
    assert (result["start"], result["values"]) == (newest, {newest + 2.0})


# The job itself


def _job(rank: int, port: int, values: Mapping[str, Any], events: Connection | None) -> None:
    """One rank of the job, as torchrun starts it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from training import job
    from training.settings import Settings

    torch.set_num_threads(1)
    if events is not None:
        listened(values["storage"], events)
    job.run(schema.parse(Settings, values), "torchrun", lambda _: None)


def start_job(values: Mapping[str, Any], events: Connection | None) -> list[Any]:
    port = free_port()
    processes = [_context.Process(target=_job, args=(rank, port, values, events)) for rank in range(2)]
    for process in processes:
        process.start()
    return processes


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run lived through: attempts, steps done twice, and the losses of all steps."""

    attempts: int
    again: int
    losses: Mapping[int, float]


def run_with_kills(data: Path, folder: Path, seed: int, kills: int) -> Outcome:
    """The job on two ranks, one or both of which are killed at a seeded event, ``kills`` times; then to its end."""
    chance = random.Random(seed)
    # Undisturbed it is heard some 230 times.
    values = schema.as_mapping(settings(data, folder, steps=8, checkpointEvery=2, export=False, workers=2, evalRows=0))
    for _ in range(kills):
        ours, theirs = _context.Pipe(duplex=False)
        processes = start_job(values, theirs)
        theirs.close()
        victims = [p.pid for p in processes] if chance.random() < 0.5 else [processes[chance.randrange(2)].pid]
        listener = kill_at(ours, chance.randrange(1, 220), lambda victims=victims: victims)
        ended(processes)
        listener.join()
        ours.close()
    processes = start_job(values, None)
    ended(processes)
    assert [p.exitcode for p in processes] == [0, 0], f"seed {seed}: the last start must end well"
    run = json.loads((folder / "r" / "run.json").read_text())
    attempts = run["attempts"]
    # What an attempt had logged and the next one did again; what it had not logged was lost before anybody saw it.
    again = sum(max(0, before["endStep"] - after["startStep"]) for before, after in itertools.pairwise(attempts))
    assert run["outcome"] == "done"
    return Outcome(len(attempts), again, losses(folder / "r"))


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, float]:
    return run_with_kills(data, tmp_path_factory.mktemp("undisturbed"), 0, 0).losses


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))])
def test_a_run_that_is_killed_ends_with_the_losses_of_the_undisturbed_run(data: Path, tmp_path: Path, undisturbed: Mapping[int, float], seed: int) -> None:
    outcome = run_with_kills(data, tmp_path, seed, 2)
    assert outcome.losses == pytest.approx(undisturbed, rel=1e-6), "same data, same order, same arithmetic"


@pytest.mark.soak
def test_fifty_kills_leave_no_trace_in_the_loss(data: Path, tmp_path: Path, undisturbed: Mapping[int, float]) -> None:
    outcomes = []
    for seed in range(50):
        outcome = run_with_kills(data, tmp_path / f"{seed}", 1000 + seed, 1)
        assert outcome.losses == pytest.approx(undisturbed, rel=1e-6), f"seed {seed}"
        outcomes.append(outcome)
        print(f"seed {seed}: {outcome.attempts} attempts, {outcome.again} logged steps done again", flush=True)
    print(
        f"50 runs, {sum(o.attempts for o in outcomes)} attempts, {sum(o.attempts > 1 for o in outcomes)} killed after their record had begun;"
        f" steps done twice: {sum(o.again for o in outcomes)}, at most {max(o.again for o in outcomes)} in a run;"
        f" last loss {undisturbed[8]!r}, furthest from it {max(abs(o.losses[8] - undisturbed[8]) for o in outcomes)!r}"
    )
