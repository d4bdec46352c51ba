"""The gate in a running job: two hosts made of network namespaces, gloo over TCP between them, and what each demand makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.namespaces import two_hosts
from tests.training.test_job import ROOT, settings, start
from training import schema
from training.errors import TransportNotProven
from training.record import read_run
from training.storage import place


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[list[str]]]:
    with two_hosts() as prefixes:
        yield prefixes


def run_on(hosts: list[list[str]], data: Path, folder: Path, **changes: Any) -> list[subprocess.CompletedProcess[str]]:
    config = folder / "job.yaml"
    config.write_text(json.dumps(schema.as_mapping(settings(data, folder, export=False, evalRows=0, **changes))))
    processes = []
    for rank, prefix in enumerate(hosts):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "192.0.2.1",
            "MASTER_PORT": "29533",
            "GLOO_SOCKET_IFNAME": "eth0",
            "TMPDIR": str(folder),
        }
        command = [*prefix, sys.executable, "-m", "training.job", "--config", str(config)]
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    done = []
    for process in processes:
        out, err = process.communicate(timeout=180)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


def test_a_tcp_run_between_two_hosts_fails_where_efa_was_demanded(hosts: list[list[str]], data: Path, tmp_path: Path) -> None:
    done = run_on(hosts, data, tmp_path, transport="efa", nicsPerHost=1, steps=500)
    assert [process.returncode for process in done] == [4, 4], "\n".join(p.stdout + p.stderr for p in done)
    assert "Traceback" not in done[0].stderr + done[1].stderr
    verdict = json.loads((tmp_path / "r" / "verdict.json").read_text())
    assert (verdict["observed"], verdict["outcome"]) == ("tcp", "fail")
    assert verdict["reasons"], "each failed rule must have its reason"
    assert all(reason["saw"] and reason["do"] and reason["where"] for reason in verdict["reasons"])
    assert "transport fail: expected efa, observed tcp" in done[0].stderr
    run, lines = read_run(place(str(tmp_path / "r")))
    assert run["outcome"] == "failed"
    assert max(line["step"] for line in lines) == 1, "it must stop after the first step, not at the end"


def test_the_same_run_passes_where_any_network_will_do(hosts: list[list[str]], data: Path, tmp_path: Path) -> None:
    done = run_on(hosts, data, tmp_path)
    assert [process.returncode for process in done] == [0, 0], "\n".join(p.stdout + p.stderr for p in done)
    verdict = json.loads((tmp_path / "r" / "verdict.json").read_text())
    assert (verdict["observed"], verdict["outcome"]) == ("tcp", "not-required")
    assert sorted(host["host"] for host in verdict["hosts"]) == ["host-a", "host-b"]
    assert all(host["nicTx"] > 0 and host["nicRx"] > 0 for host in verdict["hosts"]), "the bytes that crossed must be in the receipt"
    assert "observed tcp (2 ranks on 2 hosts)" in done[0].stdout


def test_tcp_is_proven_where_tcp_was_demanded(hosts: list[list[str]], data: Path, tmp_path: Path) -> None:
    done = run_on(hosts, data, tmp_path, transport="tcp")
    assert [process.returncode for process in done] == [0, 0], "\n".join(p.stdout + p.stderr for p in done)
    verdict = json.loads((tmp_path / "r" / "verdict.json").read_text())
    assert (verdict["observed"], verdict["outcome"]) == ("tcp", "pass")


def test_one_host_is_told_so_and_judged_again_at_each_start(data: Path, tmp_path: Path) -> None:
    start(data, tmp_path, stopAfter=3, export=False)
    first = json.loads((tmp_path / "r" / "verdict.json").read_text())
    start(data, tmp_path, export=False)
    second = json.loads((tmp_path / "r" / "verdict.json").read_text())
    assert (first["observed"], first["outcome"], first["attempt"]) == ("intra-host", "not-required", 1)
    assert second["attempt"] == 2, "a new start is a new communicator, and may be another network"
    with pytest.raises(TransportNotProven) as error:
        start(data, tmp_path, run="other", transport="efa", export=False)
    assert error.value.exit_code == 4
    reasons = json.loads((tmp_path / "other" / "verdict.json").read_text())["reasons"]
    assert any("one host" in reason["saw"] for reason in reasons), reasons


@pytest.mark.soak
def test_a_refused_network_is_not_tried_again_under_ray(data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(TransportNotProven):
        start(data, tmp_path, "ray", said.append, workers=2, transport="efa", maxFailures=3, export=False)
    assert sum("transport fail" in text for text in said) == 1, said
    run, _ = read_run(place(str(tmp_path / "r")))
    assert len(run["attempts"]) == 1, "restarting would fail the same way, at the same price"
