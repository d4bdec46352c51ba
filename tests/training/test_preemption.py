"""A SIGTERM, as a batch system, a pod's stop or a spot watcher sends it: a checkpoint, one sentence, and an exit code to go on by."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.ranks import run_ranks
from tests.training.test_job import ROOT, checkpoints, losses, settings, start
from training import schema
from training.notice import Notice, Watch
from training.record import read_run
from training.storage import place
from training.world import World

SLOWLY = {"steps": 100000, "learningRate": 1e-3, "checkpointEvery": 50000, "evalRows": 0, "export": False}


def told(world: World, rank: int, step: int) -> list[int]:
    """The steps after which this rank saw a notice, where ``rank`` alone was told, and at ``step``."""
    done = 0
    watch = Watch(world, lambda: Notice("interrupted", "SIGTERM was received") if world.rank == rank and done >= step else None, 0)
    watch._interval = 0.0  # asked after each step, or the test would take seconds
    seen = []
    for done in range(1, 9):
        if watch.look(done) is not None:
            seen.append(done)
        watch._next = done + 1
    return seen


def test_what_one_rank_is_told_all_ranks_know_after_the_same_step() -> None:
    assert run_ranks(3, told, 2, 5) == [[5]] * 3


@pytest.mark.parametrize("launcher", ["process", "torchrun"])
def test_a_sigterm_ends_the_run_after_a_checkpoint_and_the_same_command_goes_on(data: Path, tmp_path: Path, launcher: str) -> None:
    config = tmp_path / "job.json"
    config.write_text(json.dumps(schema.as_mapping(settings(data, tmp_path, **SLOWLY))))
    command = [sys.executable, "-m", "training.job", "--launcher", "process", "--config", str(config)]
    if launcher == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "training.job", "--config", str(config)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step      5/"):
                process.send_signal(signal.SIGTERM)
                break
        out, err = process.communicate(timeout=120)
    assert "SIGTERM was received; step" in out
    assert "error: ended by a signal (SIGTERM was received); start the same command again to go on" in err
    if launcher == "process":
        assert process.returncode == 143, err
        assert len(err.strip().splitlines()) == 1, "one sentence, no traceback"
    (whole,) = checkpoints(tmp_path / "r")
    step = int(whole[5:13])
    assert step >= 5
    (attempt,) = read_run(place(str(tmp_path / "r")))[0]["attempts"]
    assert (attempt["outcome"], attempt["reason"], attempt["notice"]["step"]) == ("interrupted", "SIGTERM was received", step)

    summary = start(data, tmp_path, **SLOWLY, stopAfter=step + 5)
    assert summary["resumedFrom"] == step, "nothing that was done before the signal is done again"
    start(data, tmp_path / "undisturbed", **SLOWLY, stopAfter=step + 5)
    assert losses(tmp_path / "r") == pytest.approx(losses(tmp_path / "undisturbed" / "r"), rel=1e-3)
