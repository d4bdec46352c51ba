"""Ours and what others would run, one after the other on the same GPUs, round after round; the median and spread of each.

    python -m benchmarks.speed --output benchmarks/results/one-gpu.json            on the machine with the GPU
    python -m benchmarks.speed --draw benchmarks/results/one-gpu.json              the picture beside it, anywhere

Every measurement is a process of its own. A round runs each variant once, so that a board that warms up slows all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Variant = tuple[str, str, list[str]]
"""Name, what it is, and the module with its arguments."""


def variants(model: str, length: int, ours: int, theirs: int) -> list[Variant]:
    """All of them; ``ours`` and ``theirs``: rows of a step for a way that keeps little and one that keeps whole logits."""
    size = ["--model", model]

    def step(name: str, what: str, **settings: Any) -> Variant:
        return name, what, ["benchmarks.step", *size, "--sequence-length", str(length), "--lines", "3", "--variants", json.dumps([settings])]

    def peer(name: str, what: str, rows: int) -> Variant:
        return name, what, ["benchmarks.peers", name, *size, "--length", str(length), "--rows", str(rows)]

    return [
        step("ours", "fast blocks, bf16", precision="bf16", microBatch=ours),
        step("ours fp8", "fast blocks, fp8", precision="fp8", microBatch=ours),
        step("ours compiled", "transformers' modules, compiled", blocks="compiled", microBatch=ours),
        peer("sample", "AWS's public sample: Ray Train, FSDP1", theirs),
        peer("hf", "Hugging Face Trainer", theirs),
        peer("hf_liger", "Hugging Face Trainer with Liger kernels", theirs),
        peer("fsdp2", "plain FSDP2 loop", theirs),
        peer("fsdp2_tuned", "FSDP2, compiled blocks, Liger's loss", ours),
    ]


def run(arguments: Sequence[str], limit: float) -> dict[str, Any]:
    """One measurement: what the process says, or ``error`` with the end of what it said."""
    try:
        done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit:.0f} s"}
    for line in reversed(done.stdout.splitlines()):
        text = line[line.find("{") :] if "{" in line else ""
        try:
            found = json.loads(text)
        except ValueError:
            continue
        if isinstance(found, dict) and ("tokensPerSecond" in found or "error" in found):
            return found
    return {"error": (done.stderr or done.stdout).strip()[-600:]}


def summary(name: str, what: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and spread of the runs that gave a speed; the errors of the others."""
    good = [r for r in runs if "tokensPerSecond" in r]
    result: dict[str, Any] = {"name": name, "what": what, "runs": list(runs)}
    if good:
        speeds = [r["tokensPerSecond"] for r in good]
        result |= {"median": statistics.median(speeds), "lowest": min(speeds), "highest": max(speeds), "gib": max(r["gib"] for r in good)}
        result["mfu"] = statistics.median([r["mfu"] for r in good if "mfu" in r]) if any("mfu" in r for r in good) else None
    return result


def table(results: Sequence[dict[str, Any]]) -> str:
    """For a terminal of 80 columns: tokens/s a GPU, spread, ratio to the first, MFU, memory."""
    lines = [f"{'':40}{'tokens/s':>9}{'spread':>8}{'ours is':>9}{'MFU':>6}{'GiB':>7}"]
    first = next((r["median"] for r in results if "median" in r), None)
    for r in results:
        if "median" not in r or first is None:
            lines.append(f"{r['what'][:39]:40}{'failed':>9}")
            continue
        spread = (r["highest"] - r["lowest"]) / r["median"]
        mfu = f"{r['mfu']:.0%}" if r.get("mfu") is not None else ""
        lines.append(f"{r['what'][:39]:40}{r['median']:>9,.0f}{spread:>8.1%}{first / r['median']:>8.2f}x{mfu:>6}{r['gib']:>7.1f}")
    return "\n".join(lines)


def draw(document: dict[str, Any], target: Path) -> None:
    """Bars with their spread, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    results = [r for r in document["results"] if "median" in r]
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(results) + 1.2), layout="constrained")
    names, speeds = [r["what"] for r in results], [r["median"] for r in results]
    errors = [[r["median"] - r["lowest"] for r in results], [r["highest"] - r["median"] for r in results]]
    colours = ["#2a6f97" if r["name"].startswith("ours") else "#a9b4c2" for r in results]
    bars = axes.barh(names, speeds, xerr=errors, color=colours, error_kw={"linewidth": 1})
    axes.bar_label(bars, labels=[f"{s:,.0f}" for s in speeds], padding=6)
    axes.invert_yaxis()
    axes.set_xlim(0, max(speeds) * 1.15)
    axes.set_xlabel("tokens/s a GPU")
    axes.set_title(document["title"], loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target)
    pyplot.close(figure)


def card() -> str:
    """What the GPU is and how it stands; empty without one."""
    query = ["nvidia-smi", "--query-gpu=name,temperature.gpu,clocks.sm,power.draw,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file with all measurements")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw what was measured before, and measure nothing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no further measurement starts (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these variants")
    parser.add_argument("--model", default="qwen2.5-1.5b")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs=2, default=(16, 8), metavar=("OURS", "THEIRS"), help="rows of a step (default: 16 8)")
    args = parser.parse_args()
    if args.draw:
        draw(json.loads(args.draw.read_text()), args.draw.with_suffix(".svg"))
        return 0
    if args.output is None:
        parser.error("--output is needed")
    began = time.monotonic()
    chosen = [v for v in variants(args.model, args.length, *args.rows) if not args.only or v[0] in args.only]
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name, _, _ in chosen}
    for _ in range(args.rounds):
        for name, _, arguments in chosen:
            left = args.budget - (time.monotonic() - began)
            if left < 30:
                continue
            seen[name].append(run(arguments, left) | {"card": card()})
            sys.stderr.write(f"{time.monotonic() - began:6.0f} s  {name}: {seen[name][-1].get('tokensPerSecond', seen[name][-1].get('error'))}\n")
    results = [summary(name, what, seen[name]) for name, what, _ in chosen]
    title = f"{args.model}, rows of {args.length} tokens, {card().split(',')[0] or 'CPU'}"
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({"title": title, "rounds": args.rounds, "results": results}, indent=1) + "\n")
    sys.stdout.write(f"{title}\n{table(results)}\n")
    return 0 if all("median" in r for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
