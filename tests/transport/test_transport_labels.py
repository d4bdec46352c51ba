"""What each kind of log proves about traffic between hosts, in many wordings, prefixes and mixtures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from nccl_logs import HOSTS, cri, lines_of, plus, ray, run, warn, without

from training.transport.evidence import read_files, read_text
from training.transport.verdict import Expectation, judge, observe

FIXTURES = Path(__file__).parent / "fixtures"
SHARED = Path(__file__).parents[3] / "shared" / "facts"
A, B = HOSTS
FOLDED = "\x1b[32m [repeated 7x across cluster]\x1b[0m"


def mixed_hosts() -> list[str]:
    good, bad = run(), run(network="Socket")
    return lines_of(good[:4]) + lines_of(bad[4:])


def second_communicator() -> list[str]:
    first, second = run(), run(network="Socket", comm_id="0xfeed0000feed0000")
    return [line for a, b in zip(first, second, strict=True) for line in (*a.lines, *b.lines)]


def no_device(host: str, pid: int) -> list[str]:
    head = f"{host}:{pid}:{pid + 50} [0] NCCL INFO "
    return [
        head + "Successfully loaded external network plugin /usr/lib/libnccl-net-ofi.so",
        head + "NET/OFI Initializing aws-ofi-nccl 1.18.0",
        head + "NET/OFI No eligible providers were found",
        warn(host, pid, "NET/OFI Unable to find a protocol that worked.  Failing initialization.", "int create(nccl_net_ofi_plugin_t**):301"),
        head + "Failed to initialize NET plugin Libfabric",
        head + "NET/IB : No device found.",
    ]


def fallen_back() -> list[str]:
    return [x for rank in run(per_host=1, network="Socket") for x in (*no_device(rank.host, rank.pid), *rank.lines)]


def early_provider_line() -> list[str]:
    """The plugin names efa, then fails a later check, and every rank goes on over sockets."""
    said = "NET/OFI Selected provider is efa, fabric is efa (found 1 nics)"
    failed = "Failed to initialize NET plugin Libfabric"
    return [x for r in run(network="Socket") for x in (*lines_of(plus([r], r.rank, said, failed))[-2:], *r.lines)]


def stopped(host: str) -> list[str]:
    pinned = f"{host}:5:9 [0] NCCL INFO NCCL_NET set by environment to AWS Libfabric"
    return [pinned, *no_device(host, 5), warn(host, 5, "Failed to initialize any NET plugin")]


def forged() -> list[str]:
    """A script's own prints, with every word that a plain search would look for."""
    said = ["Selected provider is efa, fabric is efa (found 1 nics)", "Using network Libfabric", "Channel 00/0 : 3[3] -> 4[0] [send] via NET/Libfabric/0"]
    quoted = [f"expecting: {line}" for line in lines_of(run())]
    return [*said, *(f"NCCL INFO {x}" for x in said), *(f"(RayTrainWorker pid=9, ip=10.77.4.9) {x}" for x in said), *quoted]


def bus_ids(lines: list[str]) -> list[str]:
    """Channel ends with bus ids in place of device numbers, as old versions print them."""
    return [re.sub(r"(\d+)\[(\d)\]", r"\1[\g<2>b0]", line.split(" INFO ")[1]).join((line.split(" INFO ")[0] + " INFO ", "")) for line in lines]


LABELLED = {
    "efa: whole job, NCCL 2.29": ("efa", lines_of(run())),
    "efa: NCCL 2.18 and plugin 1.9": ("efa", lines_of(run(network="AWS Libfabric", fabric=None, nccl="2.18"))),
    "efa: NCCL 2.22, name OFI": ("efa", lines_of(run(network="OFI", nccl="2.22"))),
    "efa: GPUDirect, proxy rank, shared buffers": ("efa", lines_of(run(per_host=8, nics=32, fabric="efa-direct", suffix="(3)/GDRDMA(PCI)/Shared"))),
    "efa: three hosts": ("efa", lines_of(run(("a", "b", "c"), 2))),
    "efa: one rank a host": ("efa", lines_of(run(per_host=1))),
    "efa: Ray's coloured stream": ("efa", ray(run())),
    "efa: container runtime's file": ("efa", cri(run())),
    "efa: kubectl with pod prefix": ("efa", [f"[pod/gpu-{i % 2}/ray-worker] {x}" for i, x in enumerate(lines_of(run()))]),
    "efa: carriage returns and a progress bar": ("efa", [f" 3%|#  | 9/300\r{x}\r" for x in lines_of(run())]),
    "efa: only the ranks at the border of the hosts": ("efa", lines_of([r for r in run() if r.rank in (0, 3, 4, 7)])),
    "efa: only one rank of each host": ("efa", lines_of([r for r in run() if r.rank in (0, 4)])),
    "efa: a script that talks of sockets": ("efa", ["Using network Socket", "via NET/Socket/0", *lines_of(run())]),
    "efa: no IB device, tuner or profiler": (
        "efa",
        lines_of(plus(run(), 2, "NET/IB : No device found.", "TUNER/Plugin: Could not find: libx.so", "NET/Plugin: Failed to find ncclNetPlugin_v10 symbol.")),
    ),
    "tcp: whole job": ("tcp", lines_of(run(network="Socket"))),
    "tcp: fell back, no device": ("tcp", fallen_back()),
    "tcp: provider efa said before the plugin failed": ("tcp", early_provider_line()),
    "tcp: libfabric's tcp provider under the plugin's name": ("tcp", lines_of(run(provider="tcp", fabric="10.77.0.0/16", nics=2))),
    "tcp: the tail of a log": ("tcp", [x for x in lines_of(run(network="Socket")) if "Channel" in x]),
    "tcp: folded by Ray": ("tcp", [x + FOLDED if ":707:" in x else x for x in ray(run(network="Socket")) if ":700:" in x or ":707:" in x]),
    "mixed: one host fell back": ("mixed", mixed_hosts()),
    "mixed: one rank fell back": ("mixed", lines_of(run()[:7] + run(network="Socket")[7:])),
    "mixed: a second communicator": ("mixed", second_communicator()),
    "mixed: folded, one rank's network line is left": (
        "mixed",
        [*(x + FOLDED for x in ray(run()) if ":701:" in x), f"(RayTrainWorker pid=706, ip=10.77.4.2) {B}:706:756 [2] NCCL INFO Using network Socket"],
    ),
    "mixed: one host on libfabric's tcp provider": ("mixed", lines_of(run()[:4] + run(provider="tcp")[4:])),
    "intra-host: one pod": ("intra-host", lines_of(run((A,), 4))),
    "intra-host: one pod that chose sockets": ("intra-host", lines_of(run((A,), 4, network="Socket"))),
    "intra-host: eight devices, some ranks shown": ("intra-host", lines_of([r for r in run((A,), 8) if r.rank in (0, 7)])),
    "tcp: sockets inside one host": (
        "tcp",
        lines_of(plus(without(run((A,), 2, network="Socket"), "SHM"), 0, "Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0")),
    ),
    "unknown: nothing of NCCL's": ("unknown", ["step 10 loss 2.4", "NCCL version 2.29.7+cuda13.0"]),
    "unknown: an empty file": ("unknown", []),
    "unknown: a script's own prints": ("unknown", forged()),
    "unknown: start-up only": ("unknown", lines_of(run(channels=False, finished=False))),
    "unknown: no provider line": ("unknown", lines_of(run(provider=None))),
    "unknown: no provider line on one host": ("unknown", lines_of(run()[:4] + run(provider=None)[4:])),
    "unknown: the tail of a log": ("unknown", [x for x in lines_of(run()) if "Channel" in x]),
    "unknown: one host of two": ("unknown", lines_of(run()[:4])),
    "unknown: two hosts of three": ("unknown", lines_of(run((A, B, "cedar-gpu-0"), 4)[:8])),
    "unknown: the first and the last host of three": ("unknown", lines_of([r for r in run((A, B, "c"), 4) if r.host != B])),
    "unknown: one rank of two hosts of three, with bus ids": ("unknown", bus_ids(lines_of([r for r in run((A, B, "c"), 3) if r.rank in (0, 6)]))),
    "efa: one rank of each host, with bus ids": ("efa", bus_ids(lines_of([r for r in run() if r.rank in (0, 4)]))),
    "efa: the rank with the channel has no start-up lines left": (
        "efa",
        lines_of(without([r for r in run() if r.rank in (0, 5, 7)], "Init", "Using", "Selected", who=7)),
    ),
    "unknown: a channel on a host where nobody names a provider": (
        "unknown",
        lines_of(without([r for r in run() if r.rank in (0, 7)], "Init", "Using", "Selected", who=7)),
    ),
    "unknown: one rank's file": ("unknown", lines_of(run()[:1])),
    "unknown: no channel on one host": ("unknown", lines_of(run()[:4] + without(run(), "NET/Libfabric/")[4:])),
    "unknown: folded by Ray": ("unknown", [x + FOLDED if ":707:" in x else x for x in ray(run()) if ":700:" in x or ":707:" in x]),
    "unknown: one process on InfiniBand among those on EFA": (
        "unknown",
        [*lines_of(run()), f"{A}:900:950 [0] NCCL INFO Channel 00/0 : 0[0] -> 4[0] [send] via NET/IB/0"],
    ),
    "unknown: InfiniBand": ("unknown", lines_of(run(network="IB", suffix="/GDRDMA"))),
    "unknown: stopped, for the network was pinned": (
        "unknown",
        [line for host in HOSTS for line in stopped(host)],
    ),
    "unknown: stopped, wording of NCCL 2.20": ("unknown", [f"{A}:5:9 [0] net.cc:510 NCCL WARN Error: network AWS Libfabric not found."]),
    "unknown: blocked by a security group": (
        "unknown",
        [*lines_of(run()), warn(A, 703, "NET/OFI Request 0x7e11 (send) completed with error: err: 113, flags: 9,", "void A::log(void*, int):9")],
    ),
    "unknown: another rank died while starting": (
        "unknown",
        [*lines_of(run(finished=False)[:7]), warn(A, 700, "socketProgress: Connection closed by remote peer birch-gpu-0<41000>")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("label", "lines"), LABELLED.values(), ids=LABELLED.keys())
def test_every_kind_of_log_is_labelled_by_what_it_proves(label: str, lines: list[str]) -> None:
    assert observe(read_text("\n".join(lines))) == label


@pytest.mark.parametrize(("label", "lines"), LABELLED.values(), ids=LABELLED.keys())
def test_only_a_log_that_proves_efa_can_pass_for_efa(label: str, lines: list[str]) -> None:
    verdict = judge(read_text("\n".join(lines)), Expectation("efa", hosts=2))
    assert (verdict.outcome == "pass") <= (label == "efa"), f"{label} passed"
    assert verdict.outcome != "pass" or not verdict.reasons
    assert verdict.outcome == "pass" or verdict.reasons, "whoever is refused must be told why"
    if label in ("tcp", "mixed", "intra-host"):
        assert verdict.outcome == "fail", f"{label} contradicts EFA, it is more than unproven: {verdict.reasons}"


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.log")), ids=lambda p: p.stem)
def test_fixture_files_carry_their_label_in_their_name(path: Path) -> None:
    assert observe(read_files([path])) == path.stem.split(".")[0]


def test_the_shared_samples_of_the_fact_sheets_are_labelled_right() -> None:
    file = SHARED / "nccl-log-samples.jsonl"
    if not file.exists():
        pytest.skip("the fact sheets are not beside this checkout")
    names = {"efa": "efa", "socket": "tcp", "mixed": "mixed", "shm-only": "intra-host", "unknown": "unknown"}
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    wrong = [(i, s["label"], seen) for i, s in enumerate(samples) if (seen := observe(read_text("\n".join(s["lines"])))) != names[s["label"]]]
    assert not wrong
    assert len(samples) >= 24


def test_real_logs_of_one_host_say_what_carried_them_and_never_pass() -> None:
    files = sorted(SHARED.glob("nccl-real/*.log"))
    if not files:
        pytest.skip("the fact sheets are not beside this checkout")
    assert {f.name: observe(read_files([f])) for f in files} == {f.name: "tcp" if "socket" in f.name else "intra-host" for f in files}
    assert all(judge(read_files([f]), Expectation(demand)).outcome == "fail" for f in files for demand in ("efa", "tcp")), "one host proves no network"
