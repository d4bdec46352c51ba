"""What only a GPU can show of a single worker: steps replayed as a CUDA graph, and a micro-batch that does not fit."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import tiny
from tests.training.test_job import ROOT, losses
from training import loop, replay
from training.errors import StartAgain
from training.fast.attention import preferred_kernels
from training.room import FILE as TOO_LARGE
from training.settings import ModelSettings, Settings
from training.storage import place
from training.world import World, process_group

STEPS = 40
EVALUATED = (1, 2, 10, 20, 30, 40)
SAME = 1e-2
"""Relative difference of two losses in bf16 whose sums may come in another order."""


@dataclasses.dataclass(frozen=True)
class Case(tiny.Case):
    """Sizes that all kernels take, and a loss that falls."""

    @property
    def settings(self) -> Settings:
        sizes = {**tiny.CONFIG, "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
        return dataclasses.replace(super().settings, model=ModelSettings(random=sizes), learning_rate=1e-3, loss_chunk=1024)


@pytest.fixture
def world() -> Iterator[World]:
    with process_group("cuda", 60) as found, preferred_kernels():
        yield found
    gc.collect()
    torch.cuda.empty_cache()  # jobs of other processes follow


def built(world: World, fp8: bool) -> tuple[Case, Any, Any, list[int]]:
    """A case, its model with fast blocks, its optimizer, and a list that grows with each call of the model."""
    case = Case(blocks="fast", fp8=fp8, compute_dtype="bf16", reshard=False, micro_batch=tiny.ROWS, steps=STEPS)
    _, net, optimizer = tiny.build(world, case)
    called, calls = net.token_loss, []

    def counted(*arguments: Any) -> Any:
        calls.append(len(calls))
        return called(*arguments)

    net.token_loss = counted
    return case, net, optimizer, calls


def learnt(world: World, case: Case, net: Any, optimizer: Any, replayed: replay.Replay | None) -> tuple[dict[int, float], list[float]]:
    """Losses by step, of always the same two batches in turn, and the held-out loss after some steps."""
    found: dict[int, float] = {}
    held_out: list[float] = []

    def after_step(done: int) -> None:
        if done in EVALUATED:
            held_out.append(loop.evaluate(net, tiny.batch_of(7, 1, 0, tiny.ROWS, False).micro_batches, case.settings, world))

    batches = (dataclasses.replace(tiny.batch_of(step % 2, 1, 0, tiny.ROWS, True), index=step) for step in range(STEPS))
    loop.train(
        net,
        optimizer,
        batches,
        case.settings,
        world,
        last_step=STEPS,
        reshard=False,
        on_line=lambda line: found.__setitem__(line.step, line.loss),
        after_step=after_step,
        replay=replayed,
    )
    return found, held_out


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_replayed_steps_learn_what_they_learn_one_by_one(world: World, tmp_path: Path, fp8: bool) -> None:
    case, net, optimizer, calls = built(world, fp8)
    one_by_one, held_out = learnt(world, case, net, optimizer, None)
    assert len(calls) == STEPS + len(EVALUATED)
    case, net, optimizer, calls = built(world, fp8)
    replayed = replay.Replay(net, case.settings, world, place(str(tmp_path)), print)
    losses_replayed, held_out_replayed = learnt(world, case, net, optimizer, replayed)
    assert len(calls) == 2 + len(EVALUATED), "the model itself is called for the first step, for the record and for evaluations only"
    assert one_by_one[STEPS] < one_by_one[2] - 1, "the loss must fall"
    for step, loss in one_by_one.items():
        assert losses_replayed[step] == pytest.approx(loss, rel=SAME), f"step {step}"
    assert held_out_replayed == pytest.approx(held_out, rel=SAME), "evaluations between replays see the same weights"


def test_a_step_that_cannot_be_recorded_is_noted_and_the_next_start_does_without(world: World, tmp_path: Path) -> None:
    case, net, optimizer, _ = built(world, False)
    called = net.token_loss

    def with_a_look(*arguments: Any) -> Any:
        loss = called(*arguments)
        loss.item()  # the host waits for the GPU, which no graph can hold
        return loss

    net.token_loss = with_a_look
    folder = place(str(tmp_path))
    assert not replay.failed_before(folder)
    with pytest.raises(StartAgain, match="could not be recorded"):
        learnt(world, case, net, optimizer, replay.Replay(net, case.settings, world, folder, print))
    assert replay.failed_before(folder)


def test_without_room_for_the_record_steps_go_on_one_by_one(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, net, optimizer, calls = built(world, False)
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (2**20, torch.cuda.get_device_properties(0).total_memory))
    losses_seen, _ = learnt(world, case, net, optimizer, replay.Replay(net, case.settings, world, place(str(tmp_path)), said.append))
    assert len(calls) == STEPS + len(EVALUATED)
    assert len(losses_seen) == STEPS
    assert len(said) == 1, "told once"
    assert "not replayed" in said[0]


def job(data: Path, folder: Path, environment: dict[str, str] | None = None, program: tuple[str, ...] = ("-m", "training.job"), **changes: Any) -> str:
    """What a job of one process says that ends well; ``program``: what Python runs."""
    values = {
        "data": str(data), "model": {"random": "qwen2.5-0.5b"}, "storage": str(folder), "run": "r", "steps": 30, "tokensPerStep": 128 * 8,
        "learningRate": 1e-4, "warmupSteps": 5, "logEvery": 1, "checkpointEvery": 10, "evalEvery": 10, "evalRows": 8, "export": False, **changes,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "job.yaml").write_text(json.dumps(values))
    command = [sys.executable, *program, "--config", str(folder / "job.yaml"), "--launcher", "process"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr + "".join(trace.read_text() for trace in folder.glob("r/failure.txt"))
    return done.stdout


def test_a_small_job_is_replayed_and_goes_on_after_a_stop_as_if_there_were_none(data: Path, tmp_path: Path) -> None:
    said = job(data, tmp_path / "whole")
    assert "steps are replayed as a CUDA graph" in said
    job(data, tmp_path / "cut", stopAfter=20)
    job(data, tmp_path / "cut")
    whole, cut = losses(tmp_path / "whole" / "r"), losses(tmp_path / "cut" / "r")
    assert json.loads((tmp_path / "cut" / "r" / "run.json").read_text())["plan"]["replayed"] is True
    assert len(whole) == 30
    assert whole[30] < whole[1] - 1, "the loss must fall"
    for step, loss in whole.items():
        assert cut[step] == pytest.approx(loss, rel=SAME), f"step {step}"


WITH_A_LOOK = """
import sys
from training import job, loop
gradients = loop.gradients
def looked_at(*arguments, **named):
    loss = gradients(*arguments, **named)
    loss.item()
    return loss
loop.gradients = looked_at
sys.exit(job.main())
"""


def test_a_job_whose_steps_cannot_be_recorded_starts_again_by_itself_and_runs_them_one_by_one(data: Path, tmp_path: Path) -> None:
    said = job(data, tmp_path, program=("-c", WITH_A_LOOK), checkpointEvery=100)
    assert "could not be recorded as a CUDA graph" in said
    assert said.count("steps are replayed") == 1, "the second start does not try"
    assert len(losses(tmp_path / "r")) == 30


def test_a_micro_batch_that_does_not_fit_is_tried_noted_and_made_smaller(data: Path, tmp_path: Path) -> None:
    share = 11 / (torch.cuda.mem_get_info()[1] / 2**30)
    said = job(
        data, tmp_path, {"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{share:.3f}"}, tokensPerStep=128 * 64, steps=3, warmupSteps=1, evalRows=0
    )
    assert "do not fit the GPU's memory; this was tried before the first step" in said
    tried = json.loads((tmp_path / "r" / TOO_LARGE).read_text())["rows"]
    run = json.loads((tmp_path / "r" / "run.json").read_text())
    assert run["plan"]["micro_batch"] < tried
    assert len(losses(tmp_path / "r")) == 3
