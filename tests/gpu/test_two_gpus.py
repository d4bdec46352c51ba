"""The job on two GPUs of one host, by NCCL: layouts, verdicts, a killed and a stopped rank."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.training.namespaces import two_hosts
from tests.training.ranks import free_port
from tests.training.test_job import ROOT, losses
from training import schema
from training.errors import EXIT_TRAINING_FAILED
from training.settings import Settings

LIMIT = 240
"""Seconds within which a start of the job must end."""
SAME = 1e-2
"""Relative difference of two losses that sum the same in another order, in bf16."""


def start(data: Path, folder: Path, prefixes: Sequence[Sequence[str]] = ((), ()), environment: dict[str, str] | None = None, **changes: Any) -> list[Any]:
    """The job, one process a GPU; with ``prefixes`` of two hosts each sees one GPU and is its host's only process."""
    values = {
        "data": str(data),
        "model": {"random": "qwen2.5-0.5b"},
        "storage": str(folder),
        "run": "r",
        "steps": 30,
        "tokensPerStep": 128 * 64,
        "microBatch": 16,
        "learningRate": 1e-4,
        "warmupSteps": 5,
        "logEvery": 1,
        "checkpointEvery": 1000,
        "evalRows": 0,
        "export": False,
        **changes,
    }
    config = folder / "job.yaml"
    config.write_text(json.dumps(schema.as_mapping(schema.parse(Settings, values))))
    port, apart = free_port(), len(prefixes[0]) > 0
    processes = []
    for rank, prefix in enumerate(prefixes):
        place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": str(rank)} if apart else {"LOCAL_RANK": str(rank)}
        meet = {"MASTER_ADDR": "192.0.2.1" if apart else "127.0.0.1", "MASTER_PORT": str(port)}
        if apart:
            meet |= {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
        world = {"RANK": str(rank), "WORLD_SIZE": str(len(prefixes)), "TMPDIR": str(folder), **place, **meet}
        command = [*prefix, sys.executable, "-m", "training.job", "--config", str(config)]
        whole = {**os.environ, "LOCAL_WORLD_SIZE": str(len(prefixes)), **world, **(environment or {})}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return processes


def ended(processes: Sequence[Any]) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    try:
        return [(process.returncode, "".join(said)) for process in processes for said in [process.communicate(timeout=LIMIT)]]
    finally:
        for process in processes:
            process.kill()


def done(data: Path, folder: Path, *arguments: Any, **changes: Any) -> dict[int, float]:
    """The losses of a run that ends well, by step."""
    folder.mkdir(exist_ok=True)
    outcomes = ended(start(data, folder, *arguments, **changes))
    assert all(code == 0 for code, _ in outcomes), "\n".join(text for _, text in outcomes)
    return losses(folder / "r")


def verdict(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "r" / "verdict.json").read_text())
    return found


def difference(a: dict[int, float], b: dict[int, float]) -> float:
    assert a.keys() == b.keys()
    worst = max(abs(a[step] - b[step]) / b[step] for step in a)
    print(f"largest relative difference over {len(a)} steps: {worst:.1e}, last loss {b[max(b)]:.4f}")
    return worst


def until_step(folder: Path, step: int, processes: Sequence[Any]) -> None:
    """Returns when the record has a line of ``step``."""
    metrics, end = folder / "r" / "metrics.jsonl", time.monotonic() + LIMIT
    while not metrics.exists() or f'"step": {step},' not in metrics.read_text():
        assert all(process.poll() is None for process in processes), "\n".join(text for _, text in ended(processes))
        assert time.monotonic() < end, f"step {step} must come"
        time.sleep(0.05)


def saved_steps(folder: Path) -> list[int]:
    """The steps whose checkpoints are whole."""
    return [json.loads(marker.read_text())["step"] for marker in (folder / "r" / "checkpoints").glob("*/complete.json")]


def until_saved(folder: Path, processes: Sequence[Any]) -> None:
    """Returns when a checkpoint is whole: it is written beside training, and steps of a small model are faster."""
    end = time.monotonic() + LIMIT
    while not saved_steps(folder):
        assert all(process.poll() is None for process in processes), "\n".join(text for _, text in ended(processes))
        assert time.monotonic() < end, "a checkpoint must come"
        time.sleep(0.05)


@pytest.mark.parametrize(("said", "grows"), [(None, True), ("expandable_segments:False", False)])
def test_memory_grows_piece_by_piece_unless_the_environment_says_otherwise(said: str | None, grows: bool) -> None:
    code = (
        "import torch\nfrom training.world import process_group\nwith process_group('cuda', 60) as world:\n    kept = torch.empty(2**27, device=world.device)\n"
    )
    code += "    print(torch.cuda.memory_snapshot()[0]['is_expandable'])"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")}
    if said is not None:
        environment["PYTORCH_ALLOC_CONF"] = said
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(grows)


def test_every_layout_has_the_same_losses(data: Path, tmp_path: Path) -> None:
    runs = {
        "one GPU": start(data, folder := _new(tmp_path, "one"), prefixes=((),)),
        "resharding": start(data, _new(tmp_path, "yes"), parallel="fsdp", reshard="yes"),
        "no resharding": start(data, _new(tmp_path, "no"), parallel="fsdp", reshard="no"),
        "gradients in bf16": start(data, _new(tmp_path, "bf16"), parallel="fsdp", reshard="no", reduceDtype="bf16"),
    }
    for name, processes in runs.items():
        for code, text in ended(processes):
            assert code == 0, f"{name}: {text}"
    one = losses(folder / "r")
    assert one[30] < one[1] - 1, f"the loss must fall: {one}"
    for name in ("yes", "no", "bf16"):
        assert difference(losses(tmp_path / name / "r"), one) < SAME, f"{name}: the layout must not change what is learnt"


def _new(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def test_shards_within_a_host_and_copies_across_two_have_the_same_losses_and_the_bytes_that_were_expected(data: Path, tmp_path: Path) -> None:
    alone = start(data, _new(tmp_path, "one"), prefixes=((),))
    with two_hosts() as hosts:
        copies = done(data, tmp_path / "hsdp", hosts, parallel="hsdp", transport="tcp", checkpointEvery=10)
        seen = verdict(tmp_path / "hsdp")
        assert (seen["observed"], seen["outcome"], seen["bytes"]) == ("tcp", "pass", "pass"), seen
        print({k: v for host in seen["hosts"] for k, v in host.items()}, seen["notes"])
        sharded = done(data, tmp_path / "fsdp", hosts, parallel="fsdp", transport="tcp", checkpointEvery=10)
        seen = verdict(tmp_path / "fsdp")
        assert (seen["observed"], seen["outcome"], seen["bytes"]) == ("tcp", "pass", "pass"), seen
        print({k: v for host in seen["hosts"] for k, v in host.items()}, seen["notes"])
    assert [code for code, _ in ended(alone)] == [0]
    one = losses(tmp_path / "one" / "r")
    assert difference(copies, one) < SAME
    assert difference(sharded, one) < SAME


@pytest.mark.parametrize(
    ("environment", "observed"),
    [
        ({}, "intra-host"),
        ({"NCCL_P2P_DISABLE": "1"}, "intra-host"),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, "tcp"),
    ],
    ids=["P2P", "SHM", "sockets"],
)
def test_the_gate_says_which_way_nccl_went(data: Path, tmp_path: Path, environment: dict[str, str], observed: str) -> None:
    done(data, tmp_path, ((), ()), environment, steps=5, warmupSteps=2)
    seen = verdict(tmp_path)
    assert (seen["observed"], seen["outcome"]) == (observed, "not-required"), seen


def test_efa_that_was_demanded_and_is_not_there_ends_the_run_before_the_second_step(data: Path, tmp_path: Path) -> None:
    outcomes = ended(start(data, tmp_path, transport="efa", nicsPerHost=1))
    assert [code for code, _ in outcomes] == [4, 4], outcomes
    metrics = tmp_path / "r" / "metrics.jsonl"
    assert not metrics.exists() or len(metrics.read_text().splitlines()) <= 1
    assert verdict(tmp_path)["outcome"] in ("fail", "unproven")


def test_a_killed_rank_costs_the_steps_since_the_checkpoint_and_nothing_else(data: Path, tmp_path: Path) -> None:
    steps = {"steps": 120, "checkpointEvery": 10}
    together = start(data, _new(tmp_path, "whole"), steps=120)
    folder = _new(tmp_path, "cut")
    running = start(data, folder, **steps, hangFloor=25)
    until_saved(folder, running)
    running[1].send_signal(signal.SIGKILL)
    outcomes = ended(running)
    assert outcomes[1][0] == -signal.SIGKILL
    assert outcomes[0][0] not in (0, 4), outcomes[0]
    assert [code for code, _ in ended(together)] == [0, 0]
    saved = max(saved_steps(folder))
    alone = ended(start(data, folder, prefixes=((),), **steps, stopAfter=saved + 15))
    assert alone[0][0] == 0, alone[0][1]
    assert f"resuming r from step {saved} (written by 2 workers, now 1)" in alone[0][1]
    again = done(data, folder, **steps)
    assert difference(again, losses(tmp_path / "whole" / "r")) < SAME
    run = json.loads((folder / "r" / "run.json").read_text())
    assert [(a["worldSize"], a["startStep"]) for a in run["attempts"]] == [(2, 0), (1, saved), (2, saved + 15)]


def test_a_stopped_rank_is_named_and_nccls_collectives_are_kept(data: Path, tmp_path: Path) -> None:
    running = start(data, tmp_path, steps=100000, hangFloor=25)
    until_step(tmp_path, 20, running)
    running[1].send_signal(signal.SIGSTOP)
    code, text = running[0].wait(timeout=LIMIT), running[0].communicate()
    running[1].kill()
    assert code == EXIT_TRAINING_FAILED, text
    assert "rank 1 on host" in text[0] + text[1], text
    assert " is late: it has not answered since step " in text[0] + text[1], text
    hang = tmp_path / "r" / "hang" / "attempt-1"
    record = pickle.loads((hang / "collectives-0").read_bytes())
    assert record["entries"], "the last collectives must be in it"
    assert {entry["state"] for entry in record["entries"]} & {"started", "scheduled"}, "the one that hangs among them"
    assert "run_rank" in (hang / "rank-0.txt").read_text()
