"""Does the fast way train as the plain one does, and fp8 as bf16? Whole jobs on one GPU, on real text.

    python -m training.prepare --set sources=[stdlib] --set output=data/text --set tokenizer=train:8192 --set sequenceLength=2048
    python -m benchmarks.converge --data data/text --output benchmarks/results/converge.json

1. From the same random weights, the same data: ``plain`` blocks (transformers' modules under FSDP2) and ``fast`` ones.
2. From the fast run's checkpoint: on in bf16, and on in fp8.

Runs of a pair share the GPU, so speeds are not measured here.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def start(storage: Path, run: str, settings: dict[str, Any]) -> subprocess.Popen[str]:
    """The job in a process of its own; its output goes to ``storage``/RUN.log."""
    command = [sys.executable, "-m", "training.job", "--launcher", "process", "--set", f"storage={storage}", "--set", f"run={run}"]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value) if isinstance(value, dict) else value}"]
    return subprocess.Popen(command, stdout=(storage / f"{run}.log").open("w"), stderr=subprocess.STDOUT, text=True)


def finish(storage: Path, jobs: dict[str, subprocess.Popen[str]]) -> None:
    """Waits for all; raises SystemExit with the end of the log of one that failed."""
    for run, job in jobs.items():
        if job.wait() != 0:
            raise SystemExit(f"{run} ended with {job.returncode}:\n{(storage / f'{run}.log').read_text()[-3000:]}")


def lines_of(storage: Path, run: str) -> list[dict[str, Any]]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (storage / run / "metrics.jsonl").read_text().splitlines()]


def branch(storage: Path, run: str, copy: str) -> None:
    """A second run that goes on from the first one's checkpoint; the weights are linked, not copied."""
    shutil.copytree(storage / run, storage / copy, copy_function=lambda source, target: Path(target).hardlink_to(source))
    for file in (p for p in (storage / copy).iterdir() if p.is_file()):
        text = file.read_bytes()
        file.unlink()
        file.write_bytes(text)


def difference(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> float:
    """The largest relative difference of the losses of the steps that both have."""
    other = {line["step"]: line["loss"] for line in b if "loss" in line}
    pairs: list[tuple[float, float]] = [(line["loss"], other[line["step"]]) for line in a if "loss" in line and line["step"] in other]
    return max(abs(x - y) / abs(y) for x, y in pairs)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.converge", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", default="qwen2.5-1.5b", help="a named size (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="rows a step (default: %(default)s)")
    parser.add_argument("--same", type=int, default=50, help="steps in which plain and fast are compared (default: %(default)s)")
    parser.add_argument("--base", type=int, default=150, help="steps before the branch (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="steps after it (default: %(default)s)")
    args = parser.parse_args()
    length = json.loads((Path(args.data) / "manifest.json").read_text())["sequence_length"]
    total = args.base + args.steps
    common = {
        "data": args.data, "model.random": args.model, "tokensPerStep": args.rows * length, "steps": total, "warmupSteps": total // 10, "learningRate": 3e-4,
        "logEvery": 1, "checkpointEvery": 10**6, "evalRows": 64, "export": "no", "activationCheckpointing": "none",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        storage = Path(scratch).resolve()
        jobs = {
            "plain": start(storage, "plain", {**common, "blocks": "plain", "microBatch": max(1, args.rows // 2), "stopAfter": args.same}),
            "bf16": start(storage, "bf16", {**common, "blocks": "auto", "microBatch": args.rows, "stopAfter": args.base}),
        }
        finish(storage, jobs)
        plain, base = lines_of(storage, "plain"), lines_of(storage, "bf16")
        shutil.rmtree(storage / "plain")
        branch(storage, "bf16", "fp8")
        jobs = {run: start(storage, run, {**common, "microBatch": args.rows, "evalEvery": 75, "precision": run}) for run in ("bf16", "fp8")}
        finish(storage, jobs)
        bf16, fp8 = lines_of(storage, "bf16"), lines_of(storage, "fp8")
        said = {run: (storage / f"{run}.log").read_text().splitlines()[:6] for run in ("bf16", "fp8")}
    evaluations = {
        name: {line["step"]: line["evalLoss"] for line in lines if "evalLoss" in line and line["step"] > args.base}
        for name, lines in (("bf16", bf16), ("fp8", fp8))
    }
    result = {
        "model": args.model, "tokensPerStep": args.rows * length,
        "plainAgainstFast": {"steps": args.same, "largestRelativeDifference": difference(base, plain)},
        "evalLoss": evaluations,
        "fp8AgainstBf16": {str(s): evaluations["fp8"][s] / v - 1 for s, v in evaluations["bf16"].items()},
        "losses": {"plain": _losses(plain), "bf16": _losses(bf16), "fp8": _losses(fp8)},
        "said": said,
    }  # fmt: skip
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, separators=(",", ":")) + "\n")
    sys.stdout.write(json.dumps({k: v for k, v in result.items() if k != "losses"}, indent=1) + "\n")
    return 0


def _evaluations(lines: list[dict[str, Any]], after: int) -> dict[int, float]:
    return {line["step"]: line["evalLoss"] for line in lines if "evalLoss" in line and line["step"] > after}


def _losses(lines: list[dict[str, Any]]) -> list[list[float]]:
    return [[line["step"], round(line["loss"], 5)] for line in lines if "loss" in line]


if __name__ == "__main__":
    sys.exit(main())
