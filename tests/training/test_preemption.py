"""A SIGTERM, as a batch system, a pod's stop or a spot watcher sends it: a checkpoint, one sentence, and an exit code to go on by."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.training.ranks import run_ranks
from tests.training.test_job import ROOT, checkpoints, losses, settings, start
from training import launch_ray, schema
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


def test_ray_s_word_of_a_preemption_names_the_workers_and_has_a_deadline_always(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.train
    from ray.train.v2.api.preemption import PreemptionInfo

    monkeypatch.setattr(launch_ray._Heard, "untold_since", None)
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: PreemptionInfo(1_800_000_000_500, {"node": [3]}))
    assert launch_ray._notice() == Notice("preempted", "the node of worker 3 is being taken away", 1_800_000_000.5)
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: PreemptionInfo(None, {"a": [2, 3], "b": [0]}))
    found = launch_ray._notice()
    assert found is not None
    assert found.reason == "the node of workers 0, 2, 3 is being taken away"
    assert found.deadline is not None
    assert found.deadline > time.time() + 60, "Ray's own patience with a node of which no time was told"
    assert launch_ray._notice() == found, "and it does not move"


def test_without_ray_s_word_of_preemptions_it_is_said_and_a_growth_is_heard_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    import ray.train

    monkeypatch.delattr(ray.train, "get_preemption_info")
    monkeypatch.setattr(launch_ray._Heard, "growth", Notice("resized", "there is room for 2 workers"))
    assert launch_ray._notice() == Notice("resized", "there is room for 2 workers")
    said: list[str] = []

    class Enough(Exception):
        pass

    def refuse(*_: object) -> None:
        raise Enough

    monkeypatch.setattr(launch_ray, "connected", refuse)
    with pytest.raises(Enough):
        launch_ray.run(schema.parse(launch_ray.Settings, {"data": "-", "model": {"random": "tiny"}}), said.append)
    assert said == [f"Ray {ray.__version__} tells its workers of no spot notice: a node that is taken away is a lost worker, and counts against maxFailures"]


def test_a_growth_waits_for_the_checkpoint_and_is_asked_for_anew_when_the_workers_were_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_ray, "ENDED_SECONDS", 0.0)
    monkeypatch.setattr(launch_ray._Heard, "growth", None)
    monkeypatch.setattr(launch_ray._Heard, "saved", threading.Event())
    for workers in (2, 3):
        answers: list[bool] = []
        controller = threading.Thread(target=lambda n=workers, to=answers: to.append(launch_ray._save_first(n)))
        controller.start()
        while launch_ray._Heard.growth is None:
            time.sleep(0.01)
        assert launch_ray._Heard.growth.reason == f"there is room for {workers} workers"
        launch_ray._saved(launch_ray._Heard.growth)
        controller.join(60)
        assert answers == [True]
        assert launch_ray._Heard.growth is None
