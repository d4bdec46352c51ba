"""``python -m training.transport judge`` as a person or a script runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from nccl_logs import HOSTS, lines_of, run, text_of

from training.transport.preflight import log_file

ROOT = Path(__file__).parents[2]


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "training.transport", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def folder_of_ranks(folder: Path, attempt: int = 0, **more: object) -> Path:
    folder.mkdir(exist_ok=True)
    for rank in run(**more):  # type: ignore[arg-type]
        log_file(folder, "demo", attempt, rank.rank).write_text(rank.text)
    return folder


def test_a_good_run_exits_0_and_says_so_in_one_line(tmp_path: Path) -> None:
    done = call("judge", folder_of_ranks(tmp_path / "logs"), "--expect", "efa", "--hosts", 2, "--nics", 1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("transport pass: expected efa, observed efa (8 ranks on 2 hosts)\n")


@pytest.mark.parametrize(
    ("more", "arguments", "code", "observed", "outcome"),
    [
        ({"network": "Socket"}, ["--expect", "efa", "--hosts", 2], 4, "tcp", "fail"),
        ({"network": "Socket"}, ["--expect", "tcp", "--hosts", 2], 0, "tcp", "pass"),
        ({"network": "Socket"}, ["--expect", "any"], 0, "tcp", "not-required"),
        ({"finished": False, "channels": False}, ["--expect", "efa"], 4, "unknown", "unproven"),
        ({}, ["--hosts", 3], 4, "efa", "unproven"),
        ({}, ["--ranks", 16], 4, "efa", "unproven"),
        ({}, ["--nics", 4], 4, "efa", "fail"),
        ({}, ["--gpudirect"], 4, "efa", "fail"),
        ({"hosts": HOSTS[:1]}, [], 4, "intra-host", "fail"),
    ],
)
def test_exit_codes_and_json(tmp_path: Path, more: dict[str, object], arguments: list[object], code: int, observed: str, outcome: str) -> None:
    done = call("judge", folder_of_ranks(tmp_path / "logs", **more), "--json", *arguments)
    document = json.loads(done.stdout)
    assert (done.returncode, document["observed"], document["outcome"]) == (code, observed, outcome), done.stdout
    assert (outcome in ("pass", "not-required")) == (not document["reasons"])
    assert all(set(reason) == {"rule", "where", "saw", "do"} and all(reason.values()) for reason in document["reasons"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["judge", "no/such/folder"], "no/such/folder"),
        (["judge", "{empty}"], "no file"),
        (["judge"], "FILE_OR_FOLDER"),
        (["judge", "x", "--expect", "ib"], "--expect"),
        (["judge", "x", "--hosts", "0"], "--hosts"),
        (["judge", "x", "--ranks", "many"], "--ranks"),
        ([], "command"),
    ],
)
def test_bad_input_is_one_clear_message_and_exit_2(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = call(*(argument.format(empty=tmp_path) for argument in arguments))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_table_fits_80_columns_and_names_rank_host_and_remedy(tmp_path: Path) -> None:
    file = tmp_path / "all.log"
    long = ("a-very-long-worker-group-name-gpu-worker-0", "b-very-long-worker-group-name-gpu-worker-0")
    file.write_text("\n".join(lines_of(run(long)[:4] + run(long, network="Socket")[4:])) + "\nold\x1b]0;title\x07 text\n")
    done = call("judge", file, "--hosts", 2)
    assert done.returncode == 4
    assert all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout
    assert "\x1b" not in done.stdout
    assert f"..{long[1][-24:]} 4-7" in done.stdout, "pods differ at the end of their names"
    assert "ranks 4-7" in done.stdout
    assert "do  " in done.stdout


def test_only_the_newest_attempt_of_a_run_counts(tmp_path: Path) -> None:
    folder = folder_of_ranks(tmp_path / "logs", attempt=0, network="Socket", first_pid=200)
    folder_of_ranks(folder, attempt=10, comm_id="0x77")
    folder_of_ranks(folder, attempt=9, network="Socket", first_pid=300)
    done = call("judge", folder, "--hosts", 2)
    assert done.returncode == 0, done.stdout
    assert "16 files of earlier attempts left out" in done.stdout
    folder_of_ranks(folder, attempt=11, network="Socket", first_pid=900)
    assert call("judge", folder, "--hosts", 2).returncode == 4, "a good attempt must not cover the one that runs"


def test_old_files_of_another_name_are_noticed(tmp_path: Path) -> None:
    folder = folder_of_ranks(tmp_path / "logs")
    (folder / "worker-old.out").write_text(text_of(run(first_pid=200, comm_id="0x77")))
    done = call("judge", folder, "--hosts", 2, "--json")
    assert done.returncode == 4
    assert [reason["rule"] for reason in json.loads(done.stdout)["reasons"]] == ["one-run"]


def test_folders_are_read_with_all_below_them_and_binary_files_do_no_harm(tmp_path: Path) -> None:
    folder_of_ranks(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "node-1")
    (tmp_path / "core.4711").write_bytes(bytes(range(256)) * 5000)
    assert call("judge", tmp_path, "--hosts", 2).returncode == 0


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    folder = folder_of_ranks(tmp_path / "logs", hosts=tuple(f"host-{n}" for n in range(64)), network="Socket")
    pipe = f"{sys.executable} -m training.transport judge '{folder}' --json | head -n 1"
    done = subprocess.run(["bash", "-c", pipe], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in done.stderr


def test_the_command_and_the_gate_need_the_standard_library_alone() -> None:
    code = "import training.transport.__main__, training.transport.gate"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_rule_is_explained_on_the_page_for_users() -> None:
    page = (ROOT / "docs/gate.md").read_text()
    source = (ROOT / "training/transport/verdict.py").read_text()
    rules = set(re.findall(r'(?:Reason\(\s*|found\[)"([\w-]+)"', source)) | {f"preflight-{rule}" for rule in ("device", "provider", "memlock", "interface")}
    assert len(rules) > 15, "the pattern no longer finds the rules"
    assert not [rule for rule in sorted(rules - {"observed"}) if f"`{rule}`" not in page]


MEASURED = """
import sys
from training.transport.__main__ import main
code = main(sys.argv[1:])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(peak.split()[1], file=sys.stderr)
sys.exit(code)
"""


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """Kernel's own high-water mark of the process (VmHWM, kB) for a log and for one 8 times as long."""
    lines = [*lines_of(run()), *(f"step {n} loss {n % 97 / 10} tokens_per_s 11873" for n in range(20_000))]
    busy = [f"alder-gpu-0:700:750 [0] NCCL INFO Channel {n % 64:02d}/{n} : 7[3] -> 0[0] [receive] via NET/Libfabric/0" for n in range(10_000)]
    part = "\n".join(lines + busy) + "\n"
    peaks = []
    for times in (2, 16):
        file = tmp_path / f"{times}.log"
        with file.open("w") as out:
            for _ in range(times):
                out.write(part)
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, "judge", str(file), "--hosts", "2"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stderr))
    assert peaks[1] - peaks[0] < 4096, f"{peaks} kB for {2 * len(part)} and {16 * len(part)} bytes"
