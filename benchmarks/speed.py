"""Ours and what others would run, one after the other on the same GPUs, round after round; the median and spread of each.

    python -m benchmarks.speed --output benchmarks/results/h200.json            on the machine with the GPU
    python -m benchmarks.speed --output benchmarks/results/h200.json --gpus 2   each alone on each of two GPUs at once, then on both together
    python -m benchmarks.speed --draw benchmarks/results/h200.json              the picture beside it, anywhere

Every measurement is a process of its own. A round runs each variant once, so that a board that warms up slows all of them. What a file holds already
is kept, and counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """A way to train: its name, what it is, and its module with arguments; ``by_torchrun``: torchrun starts it on several GPUs."""

    name: str
    what: str
    arguments: list[str]
    by_torchrun: bool = False

    def command(self, gpus: int) -> list[str]:
        """What runs it on ``gpus`` GPUs."""
        if self.by_torchrun and gpus > 1:
            return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", "-m", *self.arguments]
        return [sys.executable, "-m", *self.arguments, *([] if self.by_torchrun else ["--workers", str(gpus)])]


def variants(model: str, length: int, ours: int, theirs: int) -> list[Variant]:
    """All of them; ``ours`` and ``theirs``: rows of a step for a way that keeps little and one that keeps whole logits."""
    size = ["--model", model, "--length", str(length)]

    def job(name: str, what: str, *settings: str) -> Variant:
        return Variant(name, what, ["benchmarks.job", *size, "--rows", str(ours), *(word for value in settings for word in ("--set", value))])

    def peer(name: str, what: str, rows: int, *more: str) -> Variant:
        return Variant(name, what, ["benchmarks.peers", name, *size, "--rows", str(rows), *more], by_torchrun=name != "sample")

    return [
        job("ours", "this project, bf16"),
        job("ours fp8", "this project, fp8", "precision=fp8"),
        peer("sample", "AWS's public sample: Ray Train, FSDP1", theirs),
        peer("hf", "Hugging Face Trainer", theirs),
        peer("hf_liger", "Hugging Face Trainer with Liger kernels", ours),
        peer("fsdp2", "plain FSDP2 loop", theirs),
        peer("fsdp2_tuned", "FSDP2, compiled blocks, Liger's loss", ours, "--no-reshard"),
    ]


def run(command: Sequence[str], limit: float, gpus: Sequence[int] = (0,)) -> dict[str, Any]:
    """One measurement on ``gpus``: what the process says, or ``error`` with the end of what it said; ``card``: how the GPUs stood under its load."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    alone = [sys.executable, "-m", "benchmarks.alone", f"{limit}", *command]
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        watched = pool.submit(busiest, gpus, over)
        try:
            done = subprocess.run(alone, capture_output=True, text=True, check=True, env=environment)
        finally:
            over.set()
        found: dict[str, Any] = json.loads(done.stdout)
        return found | {"card": watched.result()}


def round_of(variant: Variant, gpus: int, limit: float) -> list[dict[str, Any]]:
    """The variant on each of ``gpus`` GPUs alone, at the same time; where there are several, on all together then."""
    with ThreadPoolExecutor(gpus) as pool:
        results = list(pool.map(lambda gpu: run(variant.command(1), limit, [gpu]) | {"gpus": 1}, range(gpus)))
    if gpus > 1:
        results.append(run(variant.command(gpus), limit, range(gpus)) | {"gpus": gpus})
    return results


def summary(name: str, what: str, gpus: int, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median and spread of the runs that gave a speed; the errors of the others."""
    good = [r for r in runs if "tokensPerSecond" in r]
    result: dict[str, Any] = {"name": name, "what": what, "gpus": gpus, "runs": list(runs)}
    if good:
        speeds = [r["tokensPerSecond"] for r in good]
        result |= {"median": statistics.median(speeds), "lowest": min(speeds), "highest": max(speeds), "gib": max(r["gib"] for r in good)}
        result["mfu"] = statistics.median([r["mfu"] for r in good if "mfu" in r]) if any("mfu" in r for r in good) else None
    return result


def table(results: Sequence[dict[str, Any]]) -> str:
    """For a terminal of 80 columns: tokens/s a GPU, spread, how many times ours the first is, MFU, memory; then what several GPUs keep of one's speed."""
    lines = [f"{'on one GPU':40}{'tokens/s':>9}{'spread':>8}{'ours is':>9}{'MFU':>6}{'GiB':>7}"]
    alone = {r["name"]: r for r in results if r["gpus"] == 1}
    first = next((r["median"] for r in alone.values() if "median" in r), None)
    for r in alone.values():
        if "median" not in r or first is None:
            lines.append(f"{r['what'][:39]:40}{'failed':>9}")
            continue
        mfu = f"{r['mfu']:.0%}" if r.get("mfu") is not None else ""
        lines.append(f"{r['what'][:39]:40}{r['median']:>9,.0f}{_spread(r):>8.1%}{first / r['median']:>8.2f}x{mfu:>6}{r['gib']:>7.1f}")
    together = [r for r in results if r["gpus"] > 1]
    if together:
        lines.append(f"{'on ' + str(together[0]['gpus']) + ' GPUs, each':40}{'tokens/s':>9}{'spread':>8}{'of one':>9}")
    for r in together:
        if "median" not in r or "median" not in alone.get(r["name"], {}):
            lines.append(f"{r['what'][:39]:40}{'failed':>9}")
            continue
        lines.append(f"{r['what'][:39]:40}{r['median']:>9,.0f}{_spread(r):>8.1%}{r['median'] / alone[r['name']]['median']:>9.1%}")
    return "\n".join(lines)


def _spread(result: dict[str, Any]) -> float:
    return float((result["highest"] - result["lowest"]) / result["median"])


def draw(document: dict[str, Any], target: Path) -> None:
    """Bars with their spread, as SVG."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    results = [r for r in document["results"] if "median" in r]
    counts, names = sorted({r["gpus"] for r in results}), list(dict.fromkeys(r["what"] for r in results))
    thick = 0.8 / len(counts)
    figure, axes = pyplot.subplots(figsize=(8, (0.25 + 0.25 * len(counts)) * len(names) + 1.2), layout="constrained")
    for number, gpus in enumerate(counts):
        shown = [r for r in results if r["gpus"] == gpus]
        at = [names.index(r["what"]) + (number - (len(counts) - 1) / 2) * thick for r in shown]
        errors = [[r["median"] - r["lowest"] for r in shown], [r["highest"] - r["median"] for r in shown]]
        colours = ["#2a6f97" if r["name"].startswith("ours") else "#a9b4c2" for r in shown]
        hatch = "///" if number else None
        bars = axes.barh(
            at, [r["median"] for r in shown], thick, xerr=errors, color=colours, edgecolor="white", hatch=hatch, error_kw={"linewidth": 1}, label=_gpus(gpus)
        )
        axes.bar_label(bars, labels=[f"{r['median']:,.0f}" for r in shown], padding=6, fontsize=9)
    if len(counts) > 1:
        figure.legend(loc="outside lower right", ncols=len(counts), frameon=False, fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(r["median"] for r in results) * 1.15)
    axes.set_xlabel("tokens/s a GPU")
    axes.set_title(document["title"], loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(target)
    pyplot.close(figure)


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs at once"


def card(gpus: Sequence[int]) -> str:
    """What the GPUs are and how they stand; empty without one."""
    query = ["nvidia-smi", f"--id={','.join(map(str, gpus))}", "--query-gpu=name,temperature.gpu,clocks.sm,power.draw,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def busiest(gpus: Sequence[int], over: threading.Event) -> str:
    """Of what :func:`card` says every two seconds until ``over``, the reading with the most watts: the others are of a start or an end."""
    best, most = "", -1.0
    while True:
        said = card(gpus)
        watts = sum(float(found) for found in re.findall(r"([\d.]+) W,", said))
        if watts > most:
            best, most = said, watts
        if not said or over.wait(2):
            return best


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file with all measurements; what it holds already counts too")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw what was measured before, and measure nothing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no further measurement starts (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one measurement (default: %(default)s)")
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
    known = variants(args.model, args.length, *args.rows)
    chosen = [v for v in known if not args.only or v.name in args.only]
    seen: dict[tuple[str, int], list[dict[str, Any]]] = {}
    if args.output.exists():
        seen = {(r["name"], r["gpus"]): r["runs"] for r in json.loads(args.output.read_text())["results"]}
    title = f"{args.model}, rows of {args.length} tokens, {card([0]).split(',')[0] or 'CPU'}"
    results: list[dict[str, Any]] = []
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for variant in chosen * args.rounds:
        left = args.budget - (time.monotonic() - began)
        if left < args.limit / 4:
            break
        for result in round_of(variant, args.gpus, min(args.limit, left)):
            seen.setdefault((variant.name, result["gpus"]), []).append(result)
            shown = result.get("tokensPerSecond", str(result.get("error"))[-300:])
            sys.stderr.write(f"{time.monotonic() - began:6.0f} s  {variant.name} on {result['gpus']}: {shown}\n")
        results = [summary(v.name, v.what, gpus, seen[v.name, gpus]) for gpus in sorted({n for _, n in seen}) for v in known if (v.name, gpus) in seen]
        args.output.write_text(json.dumps({"title": title, "results": results}, indent=1) + "\n")
    sys.stdout.write(f"{title}\n{table(results)}\n")
    return 0 if results and all("median" in r for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
