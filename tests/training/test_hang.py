"""A run that hangs ends, says who is late, and leaves the stacks of its ranks."""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.training.faulty import group, values
from tests.training.test_job import ROOT, train_workers
from training import job, schema, watchdog
from training.errors import EXIT_TRAINING_FAILED
from training.record import read_run
from training.settings import Settings
from training.storage import place
from training.world import World

HOST = socket.gethostname()


def record(folder: Path) -> dict[str, Any]:
    return read_run(place(str(folder / "r")))[0]


@pytest.mark.parametrize("stopped", [1, 0], ids=["a rank", "the rank that holds the store and the record"])
def test_a_stopped_rank_is_named_by_the_others_which_leave_their_stacks_and_end(data: Path, tmp_path: Path, stopped: int) -> None:
    settings = values(data, tmp_path, steps=100000, checkpointEvery=100000, logEvery=50, hangFloor=8)
    with group(2, settings) as run:
        run.until("step     50/")
        os.kill(run.pids[stopped], signal.SIGSTOP)
        told = run.until("is late")
        assert run.ended(1 - stopped) == EXIT_TRAINING_FAILED
    assert told.startswith(f"rank {stopped} on host {HOST} is late: it has not answered since step "), told
    assert "while the others wait in step " in told
    assert record(tmp_path)["attempts"][0]["outcome"] == "failed"
    assert record(tmp_path)["attempts"][0]["reason"] == told
    stacks = tmp_path / "r" / "hang" / "attempt-1" / f"rank-{1 - stopped}.txt"
    assert "run_rank" in stacks.read_text(), "where the main thread waits must be seen"
    assert stat.S_IMODE(stacks.stat().st_mode) == 0o600, "stacks are for the owner only"
    assert (stacks.parent / f"collectives-{1 - stopped}").stat().st_size > 0
    if watchdog._py_spy(os.getpid()):
        assert "run_rank" in (stacks.parent / f"rank-{stopped}.txt").read_text(), "a neighbour must read the stacks of the one that can't write them"


def _never_reads_step_8(world: World) -> None:
    from training.data import Batches

    following = Batches.__next__

    def read(self: Batches) -> Any:
        step = following(self)
        if step.index == 7 and world.rank == world.size - 1:
            threading.Event().wait()
        return step

    Batches.__next__ = read  # type: ignore[method-assign]


def test_a_rank_that_gets_no_data_is_told_apart_from_those_that_wait_for_it(data: Path, tmp_path: Path) -> None:
    with group(2, values(data, tmp_path, hangFloor=8), _never_reads_step_8) as run:
        told = run.until("is late")
        assert [run.ended(0), run.ended(1)] == [EXIT_TRAINING_FAILED] * 2
    assert told.startswith(f"rank 1 on host {HOST} is late: it is waiting for data at step 8, while the others wait in step 8"), told
    for rank in (0, 1):
        assert (tmp_path / "r" / "hang" / "attempt-1" / f"rank-{rank}.txt").exists()
    assert record(tmp_path)["attempts"][0]["reason"] == told


def test_a_run_of_one_process_that_gets_no_data_ends_too(data: Path, tmp_path: Path) -> None:
    with group(1, values(data, tmp_path, hangFloor=8), _never_reads_step_8) as run:
        told = run.until("hangs")
        assert run.ended(0) == EXIT_TRAINING_FAILED
    assert told.startswith("the run hangs: it is waiting for data at step 8"), told
    assert record(tmp_path)["attempts"][0]["reason"] == told


def _slow_evaluation_and_record(world: World) -> None:
    from training import loop
    from training.record import RunRecord

    evaluate, log = loop.evaluate, RunRecord.log

    def slow_evaluation(*arguments: Any) -> float:
        threading.Event().wait(20)
        return evaluate(*arguments)

    def slow_log(self: RunRecord, line: Any) -> None:
        if line.step == 9:
            threading.Event().wait(20)  # on rank 0 alone: the others wait for it in a collective
        log(self, line)

    loop.evaluate, RunRecord.log = slow_evaluation, slow_log  # type: ignore[assignment, method-assign]


@pytest.mark.soak
def test_an_evaluation_or_a_slow_record_is_no_hang_however_long_it_takes(data: Path, tmp_path: Path) -> None:
    settings = values(data, tmp_path, steps=12, evalRows=8, hangFloor=8, hangFactor=0.001)
    with group(2, settings, _slow_evaluation_and_record) as run:
        assert [run.ended(0), run.ended(1)] == [0, 0], "the others must wait for it"
    assert record(tmp_path)["outcome"] == "done"
    assert not (tmp_path / "r" / "hang").exists()


@pytest.mark.soak
def test_under_ray_a_group_with_a_stopped_worker_is_started_again_from_the_last_checkpoint(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = f"marker-{tmp_path}"
    monkeypatch.setenv("HANG_TEST", marker)
    said: list[str] = []
    stopped: list[int] = []

    def listen(text: str) -> None:
        said.append(text)
        if text.strip().startswith("step 12/") and not stopped:
            worker = train_workers(marker)[-1]
            stopped.append(os.pidfd_open(worker))
            os.kill(worker, signal.SIGSTOP)

    summary = job.run(schema.parse(Settings, values(data, tmp_path, workers=2, maxFailures=1, hangFloor=8)), "ray", listen)
    assert (summary["step"], summary["resumedFrom"]) == (20, 10)
    told = next(line for line in said if "is late" in line)
    first, second = record(tmp_path)["attempts"]
    assert (first["outcome"], first["reason"]) == ("failed", told)
    assert (second["outcome"], second["startStep"]) == ("done", 10)
    assert select.select(stopped, [], [], 60)[0] == stopped, "the stopped worker must not be left behind"
    os.close(stopped[0])


_HELD_BY_CUDA = """
import dataclasses, sys, threading, torch
from training import storage, watchdog
from training.world import process_group

class Event:
    def __init__(self, reached): self.reached = reached
    def query(self): return self.reached or threading.Event().wait()
    def elapsed_time(self, other): return 1.0

with process_group("cpu", 60) as world:
    world = dataclasses.replace(world, device=torch.device("cuda"))
    watch = watchdog.Watchdog(world, storage.place(sys.argv[1]), 1, 0, 10.0, 2.0, lambda text, done: print(text, flush=True))
    watch._queued.extend((step, Event(step < 4)) for step in range(1, 5))
    threading.Event().wait()
"""


def test_a_question_to_the_gpu_that_is_never_answered_does_not_hold_up_the_judgement(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _HELD_BY_CUDA, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == EXIT_TRAINING_FAILED, done.stdout + done.stderr
    assert "the run hangs" in done.stdout
    assert "at step 4" in done.stdout, "three steps were done"
    assert "wait" in (tmp_path / "hang" / "attempt-1" / "rank-0.txt").read_text()


_SLOW_STORE = """
import dataclasses, sys, threading
from training import storage, watchdog
from training.world import process_group

class Slow:
    def __init__(self, store): self.store = store
    def __getattr__(self, name):
        entered.set()
        threading.Event().wait(0.2)
        return getattr(self.store, name)

entered, own = threading.Event(), watchdog._own_connection
watchdog._own_connection = lambda: Slow(own())
with process_group("cpu", 60) as world:
    watch = watchdog.Watchdog(dataclasses.replace(world, size=2), storage.place(sys.argv[1]), 1, 0, 10.0, 2.0, print)
    entered.wait()
    watch.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("watchdog")]
sys.exit(f"still there: {left}" if left else 4)
"""


def test_no_thread_of_a_closed_watch_is_left_in_the_store(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _SLOW_STORE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 4, f"it would abort the process at the interpreter's end: {done.stdout + done.stderr}"
