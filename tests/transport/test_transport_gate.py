"""The two calls of a running job, with this process as a rank: real environment, real files, real counters in folder trees."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from nccl_logs import run

from training.errors import EXIT_TRANSPORT_NOT_PROVEN, TransportNotProven
from training.transport import gate
from training.transport.verdict import Expectation, ExpectedBytes

OTHER = "the-other-host"


@pytest.fixture(autouse=True)
def environment_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NET", "NCCL_NET_PLUGIN", "FI_PROVIDER", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def kernel(root: Path, efa: int, nic: int = 0) -> Path:
    counters = root / "class/infiniband/rdmap0s6/ports/1/hw_counters"
    statistics = root / "class/net/eth0/statistics"
    for folder, value in ((counters, efa), (statistics, nic)):
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tx_bytes", "rx_bytes"):
            (folder / name).write_text(f"{value}\n")
    return root


def two_ranks(tmp_path: Path, expectation: Expectation, network: str = "Libfabric", moved: int = 0) -> tuple[gate.Started, Any]:
    """Rank 0 is this process; rank 1's report is what the same code would have sent from another host."""
    sys = kernel(tmp_path / "sys", efa=1000)
    started = gate.start(expectation, tmp_path / "nccl", "demo", 0, 0, 0, "nccl", sys=str(sys))
    started = dataclasses.replace(started, checks=None)  # this machine has no EFA device
    mine, other = run((started.host, OTHER), 1, network=network, first_pid=started.pid)
    Path(os.environ["NCCL_DEBUG_FILE"]).write_text(mine.text)
    kernel(sys, efa=1000 + moved)

    def gather(own: dict[str, Any]) -> list[dict[str, Any]]:
        file = tmp_path / "other.log"
        file.write_text(other.text)
        there = dataclasses.replace(started, rank=1, host=OTHER, pid=other.pid, log_file=str(file))
        return json.loads(json.dumps([own, gate.report(there, sys=str(sys))]))

    return started, gather


def test_a_job_over_efa_goes_on_and_leaves_its_verdict(tmp_path: Path) -> None:
    expectation = Expectation("efa", hosts=2, ranks=2, nics_per_host=1)
    started, gather = two_ranks(tmp_path, expectation, moved=5 * 10**9)
    verdict = gate.judge_now(started, expectation, gather, ExpectedBytes(5 * 10**9), sys=str(tmp_path / "sys"))
    gate.stop_unless_proven(verdict)
    document = verdict.as_dict()
    assert (document["run"], document["attempt"], document["outcome"], document["bytes"]) == ("demo", 0, "pass", "pass")
    assert {h["host"]: h["efaTx"] for h in document["hosts"]} == {started.host: 5 * 10**9, OTHER: 5 * 10**9}
    assert document["judgedAt"]


def test_a_job_over_sockets_is_stopped_with_one_sentence_and_exit_code_4(tmp_path: Path) -> None:
    expectation = Expectation("efa", hosts=2, ranks=2)
    started, gather = two_ranks(tmp_path, expectation, network="Socket")
    verdict = gate.judge_now(started, expectation, gather, sys=str(tmp_path / "sys"))
    with pytest.raises(TransportNotProven) as error:
        gate.stop_unless_proven(verdict)
    assert error.value.exit_code == EXIT_TRANSPORT_NOT_PROVEN
    assert "expected efa, observed tcp" in str(error.value)
    assert "\n" not in str(error.value)


def test_bytes_are_counted_from_the_mark(tmp_path: Path) -> None:
    expectation = Expectation("efa", hosts=2, ranks=2)
    started, _ = two_ranks(tmp_path, expectation, moved=500)
    sys = tmp_path / "sys"
    marked = gate.mark(started, sys=str(sys))
    kernel(sys, efa=1000 + 500 + 70)
    assert gate.report(started, sys=str(sys))["moved"]["efa"] == {"rdmap0s6/1": [570, 570]}
    assert gate.report(marked, sys=str(sys))["moved"]["efa"] == {"rdmap0s6/1": [70, 70]}


def test_only_the_first_rank_of_a_host_counts_and_checks(tmp_path: Path) -> None:
    expectation = Expectation("efa", hosts=2, ranks=8)
    first = gate.start(expectation, tmp_path / "nccl", "demo", 0, 4, 0, "nccl", sys=str(kernel(tmp_path / "sys", 1)))
    second = gate.start(expectation, tmp_path / "nccl", "demo", 0, 5, 1, "nccl", sys=str(tmp_path / "sys"))
    assert first.before is not None
    assert first.checks is not None
    assert (second.before, second.checks) == (None, None)
    assert gate.report(second)["moved"] is None


def test_a_start_prepares_the_environment_and_a_private_folder(tmp_path: Path) -> None:
    started = gate.start(Expectation("tcp"), tmp_path / "deep/nccl", "demo", 2, 3, 1, "nccl")
    assert os.environ["NCCL_NET"] == "Socket"
    assert os.environ["NCCL_DEBUG_FILE"] == started.log_file
    assert "attempt-2" in started.log_file
    assert stat.S_IMODE((tmp_path / "deep/nccl").stat().st_mode) == 0o700


def test_an_interface_that_somebody_chose_is_left(tmp_path: Path) -> None:
    os.environ["NCCL_SOCKET_IFNAME"] = "=ens7"
    gate.start(Expectation("any"), tmp_path, "demo", 0, 0, 0, "nccl")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=ens7"


@pytest.mark.parametrize(("transport", "outcome"), [("any", "not-required"), ("efa", "fail")])
def test_gloo_inside_one_host_is_said_and_refused_only_where_efa_is_demanded(tmp_path: Path, transport: str, outcome: str) -> None:
    expectation = Expectation(transport, hosts=1, ranks=2)
    ranks = [gate.start(expectation, tmp_path, "demo", 0, rank, rank, "gloo") for rank in range(2)]
    assert "NCCL_DEBUG_FILE" not in os.environ, "gloo needs nothing of NCCL"
    reports = [gate.report(dataclasses.replace(r, pid=r.pid + r.rank)) for r in ranks]
    verdict = gate.judge_reports(reports, expectation, "demo", 0)
    assert (verdict.outcome, verdict.observed) == (outcome, "intra-host")


def test_one_process_with_a_gpu_is_inside_its_host_though_nccl_says_nothing(tmp_path: Path) -> None:
    expectation = Expectation("any", hosts=1, ranks=1)
    started = gate.start(expectation, tmp_path, "demo", 0, 0, 0, "nccl")
    verdict = gate.judge_now(started, expectation, lambda own: [own])
    assert (verdict.outcome, verdict.observed) == ("not-required", "intra-host")


def test_a_rank_whose_log_never_came_stops_the_run(tmp_path: Path) -> None:
    expectation = Expectation("efa", hosts=2, ranks=2)
    started, gather = two_ranks(tmp_path, expectation, moved=5)
    Path(started.log_file).unlink()
    verdict = gate.judge_now(started, expectation, gather, sys=str(tmp_path / "sys"))
    assert verdict.outcome == "unproven"
    with pytest.raises(TransportNotProven, match="no log file"):
        gate.stop_unless_proven(dataclasses.replace(verdict, reasons=tuple(r for r in verdict.reasons if r.rule == "evidence")))
