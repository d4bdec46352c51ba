"""What is read from NCCL's lines, and what is said about logs that are not whole."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from nccl_logs import HOSTS, lines_of, plus, run, text_of

from training.transport.evidence import Communicator, Link, Provider, collect_rank, from_dict, read_files, read_text

A, B = HOSTS


def one(*messages: str, head: str = "alder:40:41 [2] NCCL INFO ") -> str:
    return "".join(head + message + "\n" for message in messages)


def test_a_rank_is_read_into_types() -> None:
    (rank,) = read_text(
        one(
            "NCCL version 2.29.7+cuda13.0",
            "Bootstrap: Using ens7:10.1.1.1<0>",
            "NCCL_NET set by environment to AWS Libfabric",
            "NET/OFI Initializing aws-ofi-nccl 1.20.0",
            "NET/OFI Selected provider is efa, fabric is efa-direct (found 4 nics)",
            "Using network AWS Libfabric",
            "[Rank 2] ncclCommInitRankConfig comm 0xa1 rank 2 nranks 8 cudaDev 2 nvmlDev 2 busId 1c0 commId 0xfe01 - Init START",
            "comm 0xa1 rank 2 nRanks 8 nNodes 2 localRanks 4 localRank 2 MNNVL 0",
            "Channel 07/1 : 2[2] -> 6[2] [send] via NET/AWS Libfabric/3(1)/GDRDMA(PCI)/Shared",
            "Channel 00 : 2[2] -> 3[3] via SHM/direct/direct",
            "Connected all rings, use ring PXN 0 GDR 1",
            "ncclCommInitRankConfig comm 0xa1 rank 2 nranks 8 cudaDev 2 nvmlDev 2 busId 1c0 commId 0xfe01 - Init COMPLETE",
        )
    )
    assert (rank.host, rank.pid, rank.rank, rank.nccl, rank.plugin, rank.interface) == ("alder", 40, 2, "2.29.7+cuda13.0", "1.20.0", "ens7")
    assert rank.networks == ("AWS Libfabric",)
    assert rank.providers == (Provider("efa", "efa-direct", 4),)
    assert rank.communicators == (Communicator("0xfe01", "0xa1", 2, 8, 2, "AWS Libfabric", complete=True),)
    assert rank.links == (Link("NET", "AWS Libfabric", True, 2, 2, 6, 2, "send"), Link("SHM", "", False, 2, 2, 3, 3, ""))
    assert rank.connected
    assert dict(rank.environment) == {"NCCL_NET": "AWS Libfabric"}
    assert from_dict(json.loads(json.dumps(rank.as_dict()))) == rank


@pytest.mark.parametrize(
    "line",
    [
        "comm 0xa rank 1 nranks 2 cudaDev 0 busId 1e0 commId 0xb - Init START",
        "ncclCommInitRank comm 0xa rank 1 nranks 2 cudaDev 0 nvmlDev 0 busId 1e0 commId 0xb - Init START",
        "ncclCommInitRankConfig comm 0xa rank 1 nranks 2 cudaDev 0 nvmlDev 0 busId 1e0 commId 0xb - Init COMPLETE",
        "[Rank 1] ncclCommInitRankScalable comm 0xa rank 1 nranks 2 cudaDev 0 nvmlDev 0 busId 1e0 commId 0xb - Init START",
        "ncclCommSplit comm 0xa rank 1 nranks 2 cudaDev 0 nvmlDev 0 busId 1e0 parent 0xc splitCount 1 color 4 key 1- Init START",
    ],
)
def test_communicators_are_read_in_every_versions_wording(line: str) -> None:
    (rank,) = read_text(one(line))
    assert [(c.rank, c.nranks) for c in rank.communicators] == [(1, 2)]


def test_a_split_and_its_end_are_one_communicator() -> None:
    start = "ncclCommSplit comm 0xa rank 1 nranks 2 cudaDev 0 nvmlDev 0 busId 1e0 parent 0xc splitCount 1 color 4 key 1- Init START"
    end = "ncclCommSplit comm 0xa rank 1 nranks 2 cudaDev 0 nvmlDev 0 busId 1e0 commId 0xb - Init COMPLETE"
    for text in (one(start, end), one(end, start)):
        assert [c.complete for c in read_text(text)[0].communicators] == [True]


def test_each_communicator_knows_the_network_named_before_it() -> None:
    first, second = run(per_host=1), run(per_host=1, network="Socket", comm_id="0x2")
    (a, _) = read_text("\n".join([*first[0].lines, *second[0].lines, *first[1].lines]))
    assert {c.id: c.network for c in a.communicators} == {"0x51d07be2c4419aa3": "Libfabric", "0x2": "Socket"}


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "\x1b[36m(RayTrainWorker pid=40, ip=10.2.0.4)\x1b[0m ",
        "(RayTrainWorker pid=40) ",
        "(TrainWorker(rank=3) pid=40, ip=fd00::12) ",
        "2026-03-01T10:11:12.123456789Z stdout F ",
        "2026-03-01T10:11:12.123456789+02:00 ",
        "[2026-03-01 10:11:12] ",
        "[pod/gpu-0/ray-worker] 2026-03-01T10:11:12Z ",
        "[default3]:",
        "[1,5]<stdout>:",
        "12: ",
        "2026-03-01T10:11:12.1Z stderr F \x1b[36m(RayTrainWorker pid=40, ip=10.2.0.4)\x1b[0m ",
    ],
)
def test_the_usual_prefixes_are_seen_through(prefix: str) -> None:
    (rank,) = read_text(prefix + one("Using network Socket"))
    assert (rank.host, rank.pid, rank.networks) == ("alder", 40, ("Socket",))


@pytest.mark.parametrize(
    "text",
    [
        "Using network Libfabric\n",
        "NCCL INFO Using network Libfabric\n",
        "40:41 [2] NCCL INFO Using network Libfabric\n",
        "alder:40:41 NCCL INFO Using network Libfabric\n",
        "alder:40:41 [2] INFO Using network Libfabric\n",
        "alder:40:41 [2] NCCL DEBUG Using network Libfabric\n",
        "log says: alder:40:41 [2] NCCL INFO Using network Libfabric\n",
        '{"log": "alder:40:41 [2] NCCL INFO Using network Libfabric"}\n',
        "(RayTrainWorker pid=40) I think alder:40:41 [2] NCCL INFO Using network Libfabric\n",
    ],
)
def test_text_that_merely_looks_similar_is_no_evidence(text: str) -> None:
    assert read_text(text) == []


def test_merged_logs_are_split_into_processes() -> None:
    ranks = read_text(text_of(run()))
    assert [(r.host, r.rank) for r in ranks] == [(A, 0), (A, 1), (A, 2), (A, 3), (B, 4), (B, 5), (B, 6), (B, 7)]
    assert ranks[1].networks == ("Libfabric",)


def test_lines_across_read_blocks_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "log"
    filler = "x" * 200 + "\n"
    file.write_text("".join(filler * 700 + line + "\n" for line in lines_of(run())))
    assert file.stat().st_size > 5 << 20, "the log must span several blocks"
    assert [r.links for r in read_files([file])] == [r.links for r in read_text(text_of(run()))]


def test_what_is_missing_of_a_log_is_said() -> None:
    whole = text_of(run(per_host=1))
    assert all(rank.cut == () for rank in read_text(whole))
    cut = read_text(whole[:-20])
    assert any("ends without a newline" in what for rank in cut for what in rank.cut)
    hole = read_text(b"\0" * 4096 + whole.encode())
    assert any("NUL bytes" in what for rank in hole for what in rank.cut)
    long = read_text("y" * (3 << 20) + "\n" + whole)
    assert any("1 MiB" in what for rank in long for what in rank.cut)
    assert [r.networks for r in long] == [r.networks for r in read_text(whole)], "only the long line itself is lost"


@pytest.mark.parametrize("left", range(len("Using network AWS Libfabric")))
def test_half_a_network_name_at_the_end_is_not_taken_for_another_network(left: int) -> None:
    ranks = read_text("alder:40:41 [2] NCCL INFO " + "Using network AWS Libfabric"[:left])
    assert {name for rank in ranks for name in rank.networks} == set()


def test_a_flood_of_processes_and_channels_is_bounded_and_said() -> None:
    processes = "".join(f"h{n}:{n}:1 [0] NCCL INFO Using network Libfabric\n" for n in range(9000))
    assert len(read_text(processes)) <= 4096
    assert any("more than is kept" in what for rank in read_text(processes) for what in rank.cut)
    channels = one(
        *(f"Channel 00/0 : {n}[0] -> {n + 1}[0] [send] via NET/Libfabric/0" for n in range(9000)), "Channel 00/0 : 1[0] -> 2[0] [send] via NET/Socket/0"
    )
    (rank,) = read_text(channels)
    assert len(rank.links) <= 4096
    assert "Socket" in rank.networks, "what speaks against EFA is kept even then"


def test_a_rank_collects_its_own_file(tmp_path: Path) -> None:
    file = tmp_path / "nccl.log"
    me = run(hosts=(socket.gethostname().split(".")[0], B), per_host=1, first_pid=os.getpid())[0]
    file.write_text(me.text)
    own = collect_rank(file, socket.gethostname(), os.getpid(), 5)
    assert (own.rank, own.pid, own.networks, own.cut) == (5, os.getpid(), ("Libfabric",), ())
    file.write_text(text_of(plus(run(hosts=("other", B), per_host=1, first_pid=os.getpid() + 1), 0)))
    stranger = collect_rank(file, socket.gethostname(), os.getpid(), 5)
    assert (stranger.networks, stranger.cut) == ((), ("the log file holds no NCCL line of this process",))
    missing = collect_rank(tmp_path / "none", "a.example", 7, 5)
    assert (missing.host, missing.rank) == ("a", 5)
    assert "no log file" in missing.cut[0]
