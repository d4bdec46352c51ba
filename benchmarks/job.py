"""The project's own job on random tokens, under Ray Train or torchrun as a user starts it: one line of JSON from the record it leaves.

    python -m benchmarks.job --launcher ray --set precision=fp8
    python -m benchmarks.job --launcher torchrun --workers 2 --bare

``tokensPerSecond`` is the median of what metrics.jsonl says; ``whole`` counts everything between its first and last counted line: verdicts,
checkpoints, the record. ``--bare``: no checkpoint, no watchdog, and a line every ``--warm-up`` steps. The job is killed at its last line: the
final checkpoint is not waited for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import alone
from benchmarks.loader import make
from training.sizes import NAMED_SIZES

BESIDE = 5
"""Steps between two lines of metrics."""


def settings(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The job's settings, as its YAML file has them."""
    rows = args.rows * args.workers
    chosen: dict[str, Any] = {
        "data": str(folder / "data"), "storage": str(folder / "runs"), "run": "speed", "model": {"random": NAMED_SIZES[args.model]},
        "tokensPerStep": rows * args.length, "microBatch": args.rows, "workers": args.workers, "steps": args.warm_up + args.steps, "warmupSteps": 0,
        "learningRate": 1e-5, "logEvery": BESIDE, "checkpointEvery": args.checkpoint_every or 10**6, "evalRows": 0, "export": False,
    }  # fmt: skip
    return {**chosen, "hangFactor": 0, "logEvery": args.warm_up} if args.bare else chosen


def command(args: argparse.Namespace, config: Path) -> list[str]:
    """As a user would type it."""
    job = ["-m", "training.job", "--config", str(config), *(word for value in args.set for word in ("--set", value))]
    if args.launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.workers}", *job]
    return [sys.executable, *job, "--launcher", args.launcher]


def watch(job: subprocess.Popen[str], metrics: Path, last_step: int) -> dict[int, float]:
    """When each line was written (seconds), by its step, until that of ``last_step`` or the job's end."""
    written: dict[int, float] = {}
    while True:
        ended = job.poll() is not None
        if metrics.exists() and (lines := metrics.read_text().splitlines(keepends=True)) and lines[-1].endswith("\n"):
            written.setdefault(json.loads(lines[-1])["step"], metrics.stat().st_mtime_ns / 1e9)
        if ended or last_step in written:
            return written
        time.sleep(0.02)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs the job to its last line; what it left."""
    with tempfile.TemporaryDirectory(prefix="speed-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        make(folder / "data", (args.warm_up + args.steps) * args.rows * args.workers + 1, args.length, 2**27, min(2**16, NAMED_SIZES[args.model]["vocab_size"]))
        config, log = folder / "job.yaml", folder / "job.log"
        config.write_text(json.dumps(settings(args, folder)))
        alone.adopt()
        last = args.warm_up + args.steps
        began = time.time()
        with log.open("w") as output:
            job = subprocess.Popen(command(args, config), stdout=output, stderr=subprocess.STDOUT, text=True)
            try:
                written = watch(job, folder / "runs" / "speed" / "metrics.jsonl", last)
            finally:
                alone.end()
        if last not in written:
            return {"error": log.read_text().strip()[-1500:]}
        lines = [json.loads(line) for line in (folder / "runs" / "speed" / "metrics.jsonl").read_text().splitlines()]
        said = log.read_text().splitlines()
    counted = [line for line in lines if line["step"] > args.warm_up]
    speed = statistics.median(line["tokensPerSecondPerGpu"] for line in counted)
    whole = args.steps * args.rows * args.length / (written[last] - written[args.warm_up])
    return {
        "launcher": args.launcher, "workers": args.workers, "set": args.set, "tokensPerSecond": round(speed, 1), "whole": round(whole, 1),
        "mfu": round(statistics.median(line.get("mfu", 0.0) for line in counted), 4), "gib": round(max(line.get("memoryGiB", 0.0) for line in lines), 1),
        "start": round(written[min(written)] - began, 1), "lines": [round(line["tokensPerSecondPerGpu"]) for line in lines],
        "times": [round(at - written[args.warm_up], 2) for at in written.values()], "losses": [round(line["loss"], 4) for line in lines],
        "said": [text for text in said if not text.startswith("step")][:6],
    }  # fmt: skip


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.job", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--launcher", choices=("ray", "torchrun", "process"), default="ray")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--model", default="qwen2.5-1.5b")
    parser.add_argument("--rows", type=int, default=16, help="of a worker in a step, in one micro-batch")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="a setting of the job")
    print(json.dumps(measure(parser.parse_args())))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
