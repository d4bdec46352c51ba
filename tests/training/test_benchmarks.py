"""The benchmarks on a CPU and a tiny model: no speed is asserted, only that they run and count what they should."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import converge, loader, speed


def test_one_round_of_ours_and_of_what_others_would_run_ends_in_a_table_a_file_and_a_picture(tmp_path):
    output = tmp_path / "speed.json"
    command = [sys.executable, "-m", "benchmarks.speed", "--output", str(output), "--rounds", "1", "--model", "tiny", "--length", "64", "--rows", "2", "2"]
    done = subprocess.run([*command, "--only", "ours", "fsdp2"], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(output.read_text())["results"]
    assert [r["name"] for r in results] == ["ours", "fsdp2"]
    assert all(r["median"] > 0 for r in results)
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    subprocess.run([sys.executable, "-m", "benchmarks.speed", "--draw", str(output)], check=True)
    assert "<svg" in output.with_suffix(".svg").read_text()


def test_a_measurement_that_fails_is_shown_as_failed_and_not_left_out():
    failed = speed.run([sys.executable, "-m", "benchmarks.peers", "fsdp2", "--model", "no-such-model"], 120)
    assert "no-such-model" in failed["error"]
    result = speed.summary("hf", "Trainer", 1, [failed, {"tokensPerSecond": 10.0, "gib": 1.0}])
    assert result["median"] == 10.0
    assert "failed" in speed.table([speed.summary("ours", "Ours", 1, [failed])])


def test_the_median_and_the_spread_are_those_of_the_rounds():
    r = speed.summary("ours", "Ours", 1, [{"tokensPerSecond": s, "gib": 2.0, "mfu": 0.5} for s in (90, 100, 120)])
    assert (r["median"], r["lowest"], r["highest"], r["mfu"]) == (100, 90, 120, 0.5)


def test_losses_are_compared_step_by_step():
    a = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}, {"step": 2, "evalLoss": 9.0}]
    b = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.1}, {"step": 3, "loss": 5.0}]
    assert converge.difference(a, b) == pytest.approx(0.1 / 1.1)


def test_a_branch_of_a_run_leaves_the_run_as_it_is(tmp_path):
    (tmp_path / "bf16" / "checkpoints").mkdir(parents=True)
    (tmp_path / "bf16" / "metrics.jsonl").write_text("1\n")
    (tmp_path / "bf16" / "checkpoints" / "weights").write_text("w")
    converge.branch(tmp_path, "bf16", "fp8")
    with (tmp_path / "fp8" / "metrics.jsonl").open("a") as file:
        file.write("2\n")
    assert Path(tmp_path / "bf16" / "metrics.jsonl").read_text() == "1\n"
    assert (tmp_path / "fp8" / "checkpoints" / "weights").read_text() == "w"


def test_the_loader_is_measured_on_a_folder_and_on_s3():
    results = loader.run(seconds=0.2, tokens_per_second=10_000, latency=0.001, rows=200, length=32, rows_per_step=8)
    assert [r.case for r in results] == ["folder", "S3, no copy", "S3, no copy, 1 row a step", "S3, copied meanwhile"]
    assert [r.copied for r in results[:3]] == [1, 0, 0]
    assert all(r.steps >= 3 and 0 <= r.wait < 1 and r.nanoseconds > 0 for r in results)
    assert all(len(line) <= 80 for line in loader.table(results).splitlines())


def test_the_reading_that_is_kept_of_a_gpu_is_the_one_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "nvidia-smi"
    told.write_text(
        f"#!{sys.executable}\nimport pathlib\ncount = pathlib.Path({str(tmp_path / 'count')!r})\nasked = int(count.read_text()) if count.exists() else 0\n"
        "count.write_text(str(asked + 1))\nprint('NVIDIA H200, %d, 1500 MHz, %s W, 700.00 W' % (40 + asked, (90.5, 688.25, 120)[min(asked, 2)]))\n"
    )
    told.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    class Over(threading.Event):
        """Over after three readings, and without waiting between them."""

        def wait(self, timeout: float | None = None) -> bool:
            return int((tmp_path / "count").read_text()) == 3

    assert speed.busiest([0], Over()) == "NVIDIA H200, 41, 1500 MHz, 688.25 W, 700.00 W"
