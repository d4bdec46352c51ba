"""The job as a person starts it: what it leaves behind, how it resumes, and what each mistake is told."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training import checkpoint, job, loop, schema
from training.data import open_data, rows_of_step
from training.divergence import Diverged
from training.errors import JobError
from training.record import read_run
from training.settings import Settings
from training.storage import place

ROOT = Path(__file__).resolve().parents[2]


def settings(prepared: Path, folder: Path, **changes: Any) -> Settings:
    values = {
        "data": str(prepared),
        "model": {"random": "tiny"},
        "storage": str(folder),
        "run": "r",
        "steps": 8,
        "tokensPerStep": 32 * 8,
        "learningRate": 1e-2,
        "warmupSteps": 2,
        "logEvery": 1,
        "checkpointEvery": 3,
        "microBatch": 2,
        **changes,
    }
    return schema.parse(Settings, values)


def start(prepared: Path, folder: Path, launcher: str = "process", say: Callable[[str], None] = lambda _: None, **changes: Any) -> dict[str, Any]:
    return job.run(settings(prepared, folder, **changes), launcher, say)


def losses(run: Path) -> dict[int, float]:
    _, lines = read_run(place(str(run)))
    found = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert len(found) == len(dict(found)), "each step must be in the record once"
    return dict(found)


def checkpoints(run: Path) -> list[str]:
    return sorted(child.name for child in (run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the run that is never interrupted, of 40 steps."""
    folder = tmp_path_factory.mktemp("undisturbed")
    start(data, folder, steps=40, export=False)
    return losses(folder / "r")


def test_a_run_leaves_its_record(data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    summary = start(data, tmp_path, say=said.append)
    run, lines = read_run(place(str(tmp_path / "r")))
    assert run["outcome"] == "done"
    assert run["settings"]["steps"] == 8
    assert run["plan"]["replayed"] is False, "a CPU has no CUDA graphs"
    assert run["plan"]["blocks_together"] == 1, "two units of two blocks would be larger than this model's embedding"
    assert run["attempts"][0]["endStep"] == 8
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 9))
    assert sum("evalLoss" in line for line in lines) == 1, "one evaluation, at the end"
    first, last = losses(tmp_path / "r")[1], losses(tmp_path / "r")[8]
    assert last < first - 0.05, f"the loss must fall, {first} to {last}"
    assert summary["step"] == 8
    assert summary["evalLoss"] > 0
    assert checkpoints(tmp_path / "r") == ["step-00000006.1", "step-00000008.1"], "the last two, the final one among them"
    assert (tmp_path / "r" / "model" / "model.safetensors").exists()
    assert "<svg" in (tmp_path / "r" / "report.html").read_text()
    assert any("step 8/8" in text for text in said)


def test_stopping_and_going_on_gives_the_run_that_never_stopped(data: Path, tmp_path: Path, undisturbed: dict[int, float]) -> None:
    start(data, tmp_path, steps=40, stopAfter=17, export=False)
    run, _ = read_run(place(str(tmp_path / "r")))
    assert run["outcome"] == "stopped"
    summary = start(data, tmp_path, steps=40, export=False)
    assert summary["resumedFrom"] == 17
    assert losses(tmp_path / "r") == pytest.approx(undisturbed, rel=1e-5)


def test_a_finished_run_is_not_trained_again(data: Path, tmp_path: Path) -> None:
    start(data, tmp_path)
    before = losses(tmp_path / "r"), checkpoints(tmp_path / "r")
    said: list[str] = []
    summary = start(data, tmp_path, say=said.append)
    assert summary["step"] == 8
    assert any("already done" in text for text in said), said
    assert (losses(tmp_path / "r"), checkpoints(tmp_path / "r")) == before


def test_two_runs_in_one_folder_do_not_touch_each_other(data: Path, tmp_path: Path) -> None:
    start(data, tmp_path, run="one", export=False)
    files = {path: path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file()}
    start(data, tmp_path, run="two", seed=5, export=False)
    assert {path: path.read_bytes() for path in (tmp_path / "one").rglob("*") if path.is_file()} == files
    assert losses(tmp_path / "two") != losses(tmp_path / "one")


def test_a_run_folder_of_another_configuration_is_refused_and_untouched(data: Path, tmp_path: Path) -> None:
    start(data, tmp_path, export=False)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(JobError) as error:
        start(data, tmp_path, learningRate=5e-3)
    assert error.value.exit_code == 2
    for part in ("learningRate was 0.01, is 0.005", "another name"):
        assert part in str(error.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"data": "no/such/folder"}, ["no/such/folder", "no such folder"]),
        ({"sequenceLength": 64, "tokensPerStep": 640}, ["sequenceLength = 64", "rows of 32"]),
        ({"tokensPerStep": 100}, ["tokensPerStep = 100", "96 or 128"]),
        ({"model": {"random": "enormous"}}, ["model.random = enormous", "tiny"]),
        ({"model": {"random": {"hidden_size": 32}}}, ["needs model_type"]),
        ({"model": {"random": {"model_type": "nonesuch"}}}, ["model.random", "nonesuch"]),
        ({"model": {"random": {"model_type": "qwen2", "vocab_size": 7}}}, ["different tokens and the model 7", "tokenizer"]),
        ({"model": {"random": {"model_type": "qwen2", "max_position_embeddings": 16}}}, ["rows of 32 tokens exceed", "16"]),
        ({"model": {"pretrained": "./no-such-model"}}, ["no config.json"]),
        ({"device": "cuda"}, ["no GPU", "nvidia-smi"]),
        ({"storage": "/proc/nowhere"}, ["storage = /proc/nowhere", "may write to"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_gets_one_sentence_and_exit_2(data: Path, tmp_path: Path, changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(JobError) as error:
        start(data, tmp_path, **changes)
    assert error.value.exit_code == 2, error.value
    for part in parts:
        assert part in str(error.value), error.value
    assert "\n" not in str(error.value), "one sentence, no traceback"


def test_a_storage_that_nothing_opens_is_refused(data: Path) -> None:
    with pytest.raises(JobError) as error:
        job.run(schema.parse(Settings, {"data": str(data), "model": {"random": "tiny"}, "storage": "nonesuch://bucket/x"}), "process")
    assert error.value.exit_code == 2
    assert "nonesuch://" in str(error.value)
    assert "s3://" in str(error.value)


def test_the_command_line_prints_the_sentence_and_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "training.job", "--set", f"data={tmp_path}/gone", "--set", "model.random=tiny"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    bad = subprocess.run([sys.executable, "-m", "training.job", "--set", "step=5"], cwd=ROOT, capture_output=True, text=True)
    assert bad.returncode == 2
    assert "did you mean steps?" in bad.stderr


def test_a_row_that_one_rank_alone_can_not_read_ends_the_others_too_under_ray(data: Path, tmp_path: Path) -> None:
    spoilt = shutil.copytree(data, tmp_path / "spoilt")
    # The second row of step 4: rank 1 of two reads it.
    row = int(rows_of_step(open_data(str(data)).rows("train"), 3, 8, 0)[1])
    with (spoilt / "train-00000.bin").open("r+b") as shard:
        shard.seek((row * 32 + 16) * 2)
        shard.write(b"\xff\xff")
    with pytest.raises(JobError, match=r"worker 1 failed: .*it holds token 65,535") as error:
        # Nothing else than its error would end the run here for ten minutes.
        start(spoilt, tmp_path, "ray", workers=2, hangFactor=0, evalRows=0, export=False, maxFailures=0)
    assert error.value.exit_code == 3
    assert "start the same command again" in str(error.value)


def test_what_stops_rays_controller_is_told_and_not_only_that_it_stopped() -> None:
    import ray
    from ray.train import ControllerError

    from training import launch_ray

    inner = ray.exceptions.RayTaskError("setup", "Traceback of many lines", ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"))
    error = ControllerError(inner.as_instanceof_cause())
    assert launch_ray._one_line(error) == "ProcessGroupNCCL is only supported with GPUs, no GPUs found!", f"{error}"


def test_an_unforeseen_error_is_one_sentence_even_where_its_trace_can_not_be_kept(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from training import worker

    def breaks(*_: object) -> None:
        raise RuntimeError("cosmic ray")

    monkeypatch.setattr(worker, "run_rank", breaks)
    with pytest.raises(JobError, match="cosmic ray; the whole trace is in") as error:
        start(data, tmp_path)
    assert error.value.exit_code == 3
    assert "Traceback" in (tmp_path / "r" / "failure.txt").read_text()
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(JobError, match="cosmic ray; its trace could not be written"):
        start(data, tmp_path / "file")


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_nothing(data: Path, tmp_path: Path) -> None:
    # A rate at which a step leaves float32.
    with pytest.raises(Diverged) as error:
        start(data, tmp_path, learningRate=1e38, gradClip=0, warmupSteps=0, steps=30, checkpointEvery=1)
    assert error.value.exit_code == 3
    assert "not finite" in str(error.value)
    bad = error.value.step
    assert all(int(saved.name[5:13]) < bad for saved in (tmp_path / "r" / "checkpoints").glob("*")), "no checkpoint of a broken step may exist"
    run, _ = read_run(place(str(tmp_path / "r")))
    assert run["outcome"] == "failed"
    assert "not finite" in run["attempts"][-1]["reason"]


def test_torchrun_gives_the_same_run(data: Path, tmp_path: Path, undisturbed: dict[int, float]) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(json.dumps(schema.as_mapping(settings(data, tmp_path, steps=40, stopAfter=5, export=False))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "training.job", "--config", str(config)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 5/5") == 1, "one rank speaks"
    assert losses(tmp_path / "r") == pytest.approx({step: undisturbed[step] for step in range(1, 6)}, rel=1e-4)


def train_workers(marker: str) -> list[int]:
    """Process ids of the Ray Train workers whose environment carries ``marker``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"TrainWorker" in (folder / "cmdline").read_bytes() and marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return sorted(found)


class KillsAWorker:
    """Listens to the run, and sends SIGKILL to one of its workers when it hears of a step."""

    def __init__(self, marker: str, at: str) -> None:
        self.marker, self.at, self.said, self.killed = marker, at, [], 0

    def __call__(self, text: str) -> None:
        self.said.append(text)
        if not self.killed and text.strip().startswith(self.at):
            workers = train_workers(self.marker)
            assert len(workers) == 2, f"two workers must be running, not {workers}"
            os.kill(workers[-1], signal.SIGKILL)
            self.killed = workers[-1]


def test_a_worker_killed_half_way_costs_only_the_steps_since_the_last_checkpoint(
    data: Path, tmp_path: Path, undisturbed: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILL_TEST", f"marker-{tmp_path}")
    listener = KillsAWorker(f"marker-{tmp_path}", "step 10/40")
    summary = start(data, tmp_path, "ray", listener, steps=40, workers=2, maxFailures=1, export=False)
    assert listener.killed, "\n".join(listener.said)
    assert summary["step"] == 40
    assert summary["resumedFrom"] >= 6, "step 9 was committed, or at least the checkpoint before it"
    assert any("failed" in text and "goes on from its last checkpoint" in text for text in listener.said), listener.said
    assert losses(tmp_path / "r") == pytest.approx(undisturbed, rel=1e-4), "the curve must go on as if nothing had happened"
    run, _ = read_run(place(str(tmp_path / "r")))
    first, second = run["attempts"]
    # failed, where rank 0 lived to see its connection break; lost, where Ray ended it first
    assert first["outcome"] in ("failed", "lost"), first
    assert (second["outcome"], second["startStep"]) == ("done", summary["resumedFrom"])
    assert run["outcome"] == "done"


@pytest.mark.soak
def test_a_worker_lost_too_often_ends_with_exit_3_and_the_next_start_goes_on(
    data: Path, tmp_path: Path, undisturbed: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILL_TEST", f"marker-{tmp_path}")
    listener = KillsAWorker(f"marker-{tmp_path}", "step 10/40")
    with pytest.raises(JobError) as error:
        start(data, tmp_path, "ray", listener, steps=40, workers=2, maxFailures=0, export=False)
    assert error.value.exit_code == 3
    assert "start the same command again" in str(error.value)
    kept = checkpoints(tmp_path / "r")
    assert kept, "earlier checkpoints must be there"
    summary = start(data, tmp_path, steps=40, export=False)
    assert summary["resumedFrom"] == int(kept[-1][5:13])
    assert losses(tmp_path / "r") == pytest.approx(undisturbed, rel=1e-4)


def test_progress_that_nobody_can_hear_does_not_end_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    import ray
    from ray.util.queue import Queue

    from training import launch_ray

    with launch_ray.connected(1, lambda _: None):
        lines = Queue(actor_options={"num_cpus": 0})
        ray.kill(lines.actor)  # as when its node goes
        launch_ray._put(lines, "step 1")
        launch_ray._TellsOfRestarts(lines).after_exception(None, {1: RuntimeError("gone")})
    told = capsys.readouterr().err
    assert "step 1" in told, "what could not be shown must be in the log"
    assert "worker 1 failed" in told


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The export of a finished run, and its last loss."""
    folder = tmp_path_factory.mktemp("trained")
    summary = start(data, folder, steps=20)
    return folder / "r" / "model", summary["loss"]


def test_a_pretrained_model_goes_on_from_its_weights(data: Path, tmp_path: Path, trained: tuple[Path, float]) -> None:
    model, loss = trained
    (tmp_path / "copy").mkdir()
    for file in model.iterdir():
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    generation = json.loads((tmp_path / "copy" / "generation_config.json").read_text())
    (tmp_path / "copy" / "generation_config.json").write_text(json.dumps({**generation, "temperature": 0.25, "do_sample": True}))
    summary = start(data, tmp_path, model={"pretrained": str(tmp_path / "copy")}, steps=2, learningRate=1e-5)
    assert losses(tmp_path / "r")[1] == pytest.approx(loss, rel=0.05), "the first loss must be about the last one of the run before"
    written = json.loads((tmp_path / "r" / "model" / "generation_config.json").read_text())
    assert written["temperature"] == 0.25, "how its makers want it to write must come along"
    assert summary["step"] == 2


def test_a_pretrained_model_with_weights_missing_is_refused(data: Path, tmp_path: Path, trained: tuple[Path, float]) -> None:
    from safetensors.torch import load_file, save_file

    for file in trained[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JobError) as error:
        start(data, tmp_path / "runs", model={"pretrained": str(tmp_path)})
    assert error.value.exit_code == 2
    assert "model.norm.weight" in str(error.value)


def test_data_of_another_tokenizer_is_refused_for_a_pretrained_model(data: Path, tmp_path: Path, trained: tuple[Path, float]) -> None:
    from training import tokenizer

    for file in trained[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer.save(tokenizer.train(["quite another text, of other words"] * 20, 290), place(str(tmp_path)))
    with pytest.raises(JobError) as error:
        start(data, tmp_path / "runs", model={"pretrained": str(tmp_path)})
    assert error.value.exit_code == 2
    assert "not tokenised with the tokenizer of model.pretrained" in str(error.value)
    assert not (tmp_path / "runs").exists(), "nothing may have been started"


def test_what_a_run_takes_of_its_process_is_taken_before_the_first_step_and_given_back(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class InBackground(checkpoint.Checkpointer):
        """As on GPUs."""

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **{**named, "asynchronous": True})

        def reserve(self, model: Any) -> None:
            happened.append("memory asked for")
            super().reserve(model)

        def close(self) -> None:
            happened.append("memory given back")
            super().close()

    train = loop.train

    def watched(*arguments: Any, **named: Any) -> None:
        happened.append("imports left alone" if gc.get_freeze_count() else "imports gone through")
        train(*arguments, **named)

    monkeypatch.setattr(checkpoint, "Checkpointer", InBackground)
    monkeypatch.setattr(loop, "train", watched)
    start(data, tmp_path, export=False)
    assert happened == ["memory asked for", "imports left alone", "memory given back"]
    assert gc.get_freeze_count() == 0
    assert checkpoints(tmp_path / "r")[-1] == "step-00000008.1"


def test_the_garbage_collector_leaves_alone_what_was_there_and_takes_it_back_after_a_failure() -> None:
    from training import worker

    left_alone = []

    def fail() -> None:
        with worker._settled():
            left_alone.append(gc.get_freeze_count())
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert left_alone[0] > 10_000, "what was imported"
    assert gc.get_freeze_count() == 0, "a model that is built anew in this process needs the memory of the one before"
