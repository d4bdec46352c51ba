"""A resumed run is the run that was never interrupted, on any number of workers and under any plan."""

from __future__ import annotations

import dataclasses
import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.ranks import collect, run_ranks, start_ranks
from tests.training.test_numerics import assert_same
from tests.training.tiny import Case, build, reference, train
from training import checkpoint, dcp
from training.storage import place
from training.world import World

SAVED = Case(steps=3, save_at=(2, 3))


def names(folder: Path) -> list[str]:
    return sorted(child.name for child in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((2, 2, "fsdp"), (2, 2, "fsdp")),
        ((2, 2, "fsdp"), (3, 3, "fsdp")),
        ((2, 2, "fsdp"), (4, 2, "hsdp")),
        ((4, 2, "hsdp"), (1, 1, "fsdp")),
    ],
    ids=["2 to 2", "2 to 3", "fsdp to hsdp", "hsdp to one"],
)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, first: tuple[int, int, str], second: tuple[int, int, str]) -> None:
    case = Case(steps=6, folder=str(tmp_path), uneven=True)
    run_ranks(first[0], train, dataclasses.replace(case, parallel=first[2], together=2, stop_after=3, save_at=(2, 3)), local_size=first[1])
    assert names(tmp_path) == ["step-00000002.1", "step-00000003.1"], "steps 2 and 3, written by attempt 1"
    resumed = run_ranks(second[0], train, dataclasses.replace(case, parallel=second[2], resume=True, attempt=2), local_size=second[1])[0]
    assert_same(resumed, reference(case)[3:])


def test_a_background_checkpoint_is_as_good_as_one_in_the_foreground(tmp_path: Path) -> None:
    case = Case(steps=4, folder=str(tmp_path), save_at=(1, 2), asynchronous=True)
    run_ranks(2, train, dataclasses.replace(case, stop_after=3))
    assert names(tmp_path) == ["step-00000001.1", "step-00000002.1"]
    resumed = run_ranks(2, train, dataclasses.replace(case, resume=True, attempt=2, save_at=()))[0]
    assert_same(resumed, reference(case)[2:])


def test_the_copy_that_is_written_in_the_background_is_made_in_the_same_memory_each_time() -> None:
    state = {"model": {"w": torch.randn(3, 4)[1:], "empty": torch.empty(0)}, "step": torch.tensor(3.0), "name": "r"}
    stager = dcp.Stager()
    first = stager.copy(state)
    where = first["model"]["w"].data_ptr()
    assert torch.equal(first["model"]["w"], state["model"]["w"])
    assert where != state["model"]["w"].data_ptr(), "training goes on in the original"
    state["model"]["w"].add_(1)
    state["step"].add_(1)
    second = stager.copy(state)
    assert second["model"]["w"].data_ptr() == where, "memory that is asked for anew costs more time than the copy"
    assert torch.equal(second["model"]["w"], state["model"]["w"])
    assert (second["step"], second["name"]) == (4, "r")


def test_the_first_copy_uses_the_memory_that_was_asked_for_while_the_weights_were_read() -> None:
    state = {"w": torch.randn(100), "moment": torch.randn(100), "other": torch.randn(7)}
    stager = dcp.Stager()
    stager.reserve([400, 400, 400])
    stager._settle()
    ready = {storage.data_ptr() for storage in stager._reserved[400]}
    copied = stager.copy(state)
    used = {copied[name].data_ptr() for name in ("w", "moment")}
    assert len(used) == 2, "each for one tensor"
    assert used < ready, "two of the three"
    assert all(torch.equal(copied[name], state[name]) for name in state)
    stager.close()
    assert torch.equal(copied["w"], state["w"]), "a copy that is still being written outlives the stager"


def memory_left_and_missing(world: World, folder: str) -> tuple[list[int], list[int]]:
    """Bytes of each storage that was asked for before the first step and not used by the copy, and of those that the copy had to ask for."""
    _, net, optimizer = build(world, Case(steps=1))
    checkpoints = checkpoint.Checkpointer(place(folder), world, 1, 1, asynchronous=True)
    checkpoints.reserve(net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stager = checkpoints._stager
    stager._settle()
    missing: list[int] = []
    make = stager._new
    stager._new = lambda size: missing.append(size) or make(size)  # type: ignore[method-assign, func-returns-value]
    stager.copy(checkpoint._state(net, optimizer, world))
    left = [storage.nbytes() for storages in stager._reserved.values() for storage in storages]
    checkpoints.close()
    return left, missing


def test_a_rank_asks_beforehand_for_what_its_checkpoint_takes(tmp_path: Path) -> None:
    for rank, (left, missing) in enumerate(run_ranks(2, memory_left_and_missing, str(tmp_path))):
        assert left == [], f"rank {rank}: what is not used is lost"
        assert sum(missing) < 50_000, f"rank {rank}: what is missing is waited for; step counts and random state are all that may be: {missing}"


@pytest.mark.parametrize("harm", ["marker gone", "file gone", "file short", "marker damaged"])
def test_a_torn_checkpoint_is_never_resumed_from(tmp_path: Path, harm: str) -> None:
    case = dataclasses.replace(SAVED, folder=str(tmp_path))
    run_ranks(2, train, case)
    newest = tmp_path / "checkpoints" / "step-00000003.1"
    if harm == "marker gone":
        (newest / "complete.json").unlink()
    elif harm == "file gone":
        (newest / "__1_0.distcp").unlink()
    elif harm == "file short":
        data = (newest / "__1_0.distcp").read_bytes()
        (newest / "__1_0.distcp").write_bytes(data[: len(data) // 2])
    else:
        (newest / "complete.json").write_text('{"step": 3, "fi')
    found = run_ranks(1, _latest, str(tmp_path))[0]
    assert found[0] == "step-00000002.1", "the checkpoint before the torn one must be used"
    assert "step-00000003.1" in found[1][0], "the person must be told which one is not used"
    resumed = run_ranks(2, train, dataclasses.replace(case, resume=True, attempt=2, save_at=(3,)))[0]
    assert [line[0] for line in resumed] == [3], "step 3 must be done again"
    assert names(tmp_path) == ["step-00000002.1", "step-00000003.2"], "the torn leftover goes once a whole one is there"


def _latest(world: World, folder: str) -> tuple[str, list[str]]:
    said: list[str] = []
    found = checkpoint.latest(place(folder) / "checkpoints", world, said.append)
    return (found.folder.name if found else ""), said


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    run_ranks(1, train, Case(steps=5, folder=str(tmp_path), save_at=(1, 2, 3, 4, 5), keep=2))
    assert names(tmp_path) == ["step-00000004.1", "step-00000005.1"]


def test_a_checkpoint_that_can_not_be_written_stops_all_ranks_and_leaves_the_one_before(tmp_path: Path) -> None:
    case = Case(steps=4, folder=str(tmp_path), save_at=(1, 3))
    outcomes = collect(*start_ranks(2, _full_disk_after_step_1, case))
    for rank, (_, error) in enumerate(outcomes):
        assert error is not None, f"rank {rank} must stop"
        assert error[0] == "TrainingFailed", error[2]
        assert "step 3 could not be written" in error[1]
        assert "rank 1" in error[1], "it must say where"
        assert "step 1 is untouched" in error[1], "it must say what is left"
    assert names(tmp_path) == ["step-00000001.1"], "half-written files must not stay"
    assert run_ranks(1, _latest, str(tmp_path))[0] == ("step-00000001.1", [])


def _full_disk_after_step_1(world: World, case: Case) -> Any:
    save = checkpoint.Checkpointer.save

    def failing(self: Any, step: int, *arguments: Any) -> None:
        if step == 3 and world.rank == 1:
            # The kernel refuses to write more than this into a file, as it does on a full disk.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        try:
            save(self, step, *arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    checkpoint.Checkpointer.save = failing  # type: ignore[method-assign]
    return train(world, case)


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    sizes = {}
    for tied in (True, False):
        folder = tmp_path / str(tied)
        run_ranks(1, train, Case(steps=1, folder=str(folder), save_at=(1,), tied=tied))
        marker = json.loads((folder / "checkpoints" / "step-00000001.1" / "complete.json").read_text())
        sizes[tied] = sum(marker["files"].values())
    head = 211 * 32 * 4  # one [vocabulary, hidden] matrix; the untied one comes with two optimizer moments as well
    assert sizes[False] - sizes[True] > 2.9 * head, "a tied checkpoint must be smaller by the whole head"


def test_checkpoints_on_an_object_store_are_read_back(tmp_path: Path) -> None:
    assert run_ranks(1, _through_pyarrow, str(tmp_path))[0] == ["checkpoints/step-00000001.1"]


def _through_pyarrow(world: World, folder: str) -> list[str]:
    """Saves and loads through the pyarrow filesystem that S3 goes through, rooted in a folder."""
    import pyarrow.fs as pafs
    import torch

    from training.storage import Place

    case = Case()
    _, net, optimizer = build(world, case)
    store = Place(pafs.SubTreeFileSystem(folder, pafs.LocalFileSystem()), "checkpoints", local=False)
    store.make_folder()
    checkpoints = checkpoint.Checkpointer(store, world, 1, 2, asynchronous=False)
    checkpoints.save(1, net, optimizer, {})
    before = {name: p.full_tensor().clone() for name, p in net.named_parameters()}
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    found = checkpoint.latest(store, world, print)
    assert found is not None, "the checkpoint must be found"
    checkpoints.load(found, net, optimizer)
    for name, p in net.named_parameters():
        assert torch.equal(p.full_tensor(), before[name]), f"{name} must come back"
    return [item.folder.path for item in checkpoint.find(store)]


def test_each_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    before, after = zip(*run_ranks(2, _random_numbers, str(tmp_path)), strict=True)
    assert before == after, "what is drawn after a resume must be what would have been drawn without it"
    assert before[0] != before[1], "ranks draw different numbers"


def _random_numbers(world: World, folder: str) -> tuple[list[float], list[float]]:
    import torch

    _, net, optimizer = build(world, Case())
    torch.manual_seed(100 + world.rank)
    checkpoints = checkpoint.Checkpointer(place(folder) / "checkpoints", world, 1, 2, asynchronous=False)
    checkpoints.save(1, net, optimizer, {})
    before = torch.rand(3).tolist()
    found = checkpoint.latest(place(folder) / "checkpoints", world, print)
    assert found is not None
    checkpoints.load(found, net, optimizer)
    return before, torch.rand(3).tolist()


def test_a_checkpoint_of_another_kind_of_device_is_resumed_without_its_random_numbers(tmp_path: Path) -> None:
    assert run_ranks(1, _from_another_device, str(tmp_path)) == [True], "the state of a GPU that is not there must not be asked for"


def _from_another_device(world: World, folder: str) -> bool:
    import torch

    _, net, optimizer = build(world, Case())
    checkpoints = checkpoint.Checkpointer(place(folder) / "checkpoints", world, 1, 2, asynchronous=False)
    checkpoints.save(1, net, optimizer, {})
    marker = Path(folder) / "checkpoints" / "step-00000001.1" / "complete.json"
    marker.write_text(marker.read_text().replace('"cpu"', '"cuda"'))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    found = checkpoint.latest(place(folder) / "checkpoints", world, print)
    assert found is not None
    checkpoints.load(found, net, optimizer)
    return torch.equal(torch.get_rng_state(), state)
