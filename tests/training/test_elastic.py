"""Nodes that go, with and without notice, and new ones that come: real Ray nodes on this machine, with room for one worker each."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.elastic import Nodes, Run, paced
from tests.training.ranks import run_ranks
from tests.training.test_job import losses, settings, start
from training import layout, plan, worker
from training.errors import BadInput, TransportNotProven
from training.record import read_run
from training.storage import place
from training.world import World

# A rate at which rounding stays rounding: at 1e-2 a few hundred steps make it grow to 1%.
SHAPE: dict[str, Any] = {"steps": 300, "learningRate": 1e-3, "export": False, "evalRows": 0, "checkpointEvery": 20, "microBatch": 4}
WORKERS: dict[str, Any] = {"workers": 2, "minWorkers": 1}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the run on one worker that nothing ever happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    start(data, folder, **SHAPE)
    return losses(folder / "r")


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with paced(resize_seconds=5.0):
        yield lambda **changes: Run(settings(data, tmp_path, **{**SHAPE, **changes}))


def attempts(run: Run, undisturbed: dict[int, float]) -> list[dict[str, Any]]:
    """Lets the run end, holds its curve against the undisturbed one's, and returns its attempts."""
    assert run.ends()["step"] == SHAPE["steps"]
    folder = Path(run.settings.storage) / "r"
    assert losses(folder) == pytest.approx(undisturbed, rel=1e-3), "the curve must go on as if nothing had happened"
    return list(read_run(place(str(folder)))[0]["attempts"])


@pytest.mark.soak
def test_a_drained_node_costs_no_restart_that_counts_and_a_new_one_no_step(nodes: Nodes, run: Callable[..., Run], undisturbed: dict[int, float]) -> None:
    nodes.want(2)
    job = run(**WORKERS, maxFailures=0, checkpointEvery=1000)
    job.hears("step  25/")
    going = nodes.with_workers()[-1]
    nodes.drain(going, 15)
    job.hears("is being taken away; step")
    job.hears("now 1)")
    nodes.lose(going)
    nodes.want(2)
    job.hears("there is room for 2 workers; step")
    job.hears("now 2)")
    first, second, third = attempts(job, undisturbed)
    assert (first["outcome"], first["worldSize"]) == ("preempted", 2), first
    assert "is being taken away; the run went on with 1 worker for 2" in first["reason"]
    assert second["startStep"] == first["notice"]["step"], "it goes on from the checkpoint of the notice"
    assert first["notice"]["saveSeconds"] > 0
    assert (second["outcome"], second["worldSize"]) == ("resized", 1), second
    assert second["endStep"] == third["startStep"], "nothing is done twice because the cluster has grown"
    assert (third["outcome"], third["worldSize"]) == ("done", 2)


@pytest.mark.soak
def test_a_node_that_is_lost_without_notice_costs_the_steps_since_the_last_checkpoint(
    nodes: Nodes, run: Callable[..., Run], undisturbed: dict[int, float]
) -> None:
    nodes.want(2)
    job = run(**WORKERS, maxFailures=1)
    job.hears("step  25/")
    nodes.lose(nodes.with_workers()[-1])
    job.hears("resuming r from step 20 (written by 2 workers, now 1)")
    first, second = attempts(job, undisturbed)
    assert first["outcome"] in ("failed", "lost"), first
    assert "the run went on with 1 worker for 2" in first["reason"]
    assert (second["outcome"], second["worldSize"], second["startStep"]) == ("done", 1, 20)


@pytest.mark.soak
def test_a_run_of_a_fixed_size_moves_to_another_node_when_one_is_drained(nodes: Nodes, run: Callable[..., Run], undisturbed: dict[int, float]) -> None:
    nodes.want(3)
    job = run(workers=2, maxFailures=0, checkpointEvery=1000)
    job.hears("step  25/")
    going = nodes.with_workers()[-1]
    nodes.drain(going, 15)
    job.hears("is being taken away; step")
    job.hears("now 2)")
    nodes.lose(going)
    first, second = attempts(job, undisturbed)
    assert (first["outcome"], second["outcome"]) == ("preempted", "done")
    assert second["startStep"] == first["notice"]["step"]


def uneven(world: World, values: Any) -> tuple[bool, list[str]]:
    """A run on hosts that hold unequal numbers of workers."""
    said: list[str] = []
    worker.run_rank(values, world, worker.Hooks(said.append))
    return world.even, said


def test_hosts_with_unequal_numbers_of_workers_are_trained_on_by_fsdp_until_they_are_equal_again(data: Path, tmp_path: Path) -> None:
    values = settings(data, tmp_path, steps=4, parallel="hsdp", workers=4, minWorkers=1, export=False, evalRows=0)
    outcomes = run_ranks(3, uneven, values, local_size=2)
    assert [even for even, _ in outcomes] == [False] * 3
    said = "\n".join(outcomes[0][1])
    assert "hsdp needs as many workers on each host, and 3 workers on 2 hosts are not: fsdp until they are" in said
    start(data, tmp_path / "alone", steps=4, export=False, evalRows=0)
    assert losses(tmp_path / "r") == pytest.approx(losses(tmp_path / "alone" / "r"), rel=1e-4)


def test_fewer_workers_than_the_model_fits_are_refused_before_the_first_step(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from training import model

    values = settings(data, tmp_path, model={"random": "qwen2.5-1.5b"}, workers=8, minWorkers=1)
    monkeypatch.setattr(plan, "this_machine", lambda *_, **__: plan.machine("NVIDIA L4"))
    job = types.SimpleNamespace(settings=values, config=model.load_config(values.model, 151936), sequence_length=32, folder=place(str(tmp_path)))
    pieces = types.SimpleNamespace(fp8=False, blocks="fast")
    eight = World(0, 8, 0, 4, ("a", "b"), torch.device("cpu"))
    with pytest.raises(BadInput, match=r"minWorkers = 1 is too few: 1.54 B parameters don't fit 1 x NVIDIA L4.* Raise minWorkers"):
        layout.choose(job, eight, pieces, lambda _: None)  # type: ignore[arg-type]


def test_on_one_host_an_elastic_run_has_no_network_to_prove_and_says_so(data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    start(data, tmp_path, say=said.append, steps=2, transport="tcp", workers=2, minWorkers=1, export=False, evalRows=0)
    assert "all workers are on one host, so nothing travels between hosts; transport = tcp is judged when there are two" in said
    with pytest.raises(TransportNotProven):
        start(data, tmp_path / "fixed", steps=2, transport="tcp", workers=2, export=False, evalRows=0)
