"""One GPU, the project's own loop on random tokens: tokens/s, memory and, on demand, where a step's time goes.

    python -m benchmarks.step --variants '[{"precision": "bf16"}, {"precision": "fp8", "microBatch": 24}]' --profile out

A variant may say blocks, precision, microBatch, rows (of a step), recompute, reshard, together, replay, lossChunk. Each prints one line of JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed import card
from training import loop, model, parallel
from training.data import MicroBatch, Step
from training.fast.attention import preferred_kernels
from training.fast.choose import Pieces, choose
from training.flops import ModelShape, mfu
from training.optimizer import AdamW, divisor, make_optimizer
from training.plan import Choice, Cluster, Machine, blocks_together, estimate, machine, replayed, this_machine
from training.record import StepMetrics
from training.replay import Replay
from training.settings import ModelSettings, Settings
from training.sizes import NAMED_SIZES
from training.storage import place
from training.world import World, process_group

BESIDE = 5
"""Steps between two lines; the first line's steps are warm-up."""


def steps(rows: int, micro_batch: int, length: int, words: int, count: int) -> Iterator[Step]:
    """``count`` steps of random tokens: [micro_batch, length] each, ``rows`` in all."""
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        micros = []
        for _ in range(rows // micro_batch):
            tokens = torch.randint(0, words, (micro_batch, length + 1), generator=generator)
            micros.append(
                MicroBatch(tokens[:, :-1].contiguous().pin_memory() if torch.cuda.is_available() else tokens[:, :-1], tokens[:, 1:].contiguous(), None)
            )
        yield Step(index, micros, rows * length, 0.0)


def draw(net: Any, seed: int) -> None:
    """Random weights made where they are needed; Qwen2's rule (normal, 0.02; norms 1, biases 0)."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            local: Tensor = p.to_local()
            if p.ndim > 1:
                local.normal_(0, 0.02)
            else:
                local.fill_(1.0 if "norm" in name else 0.0)


def build(world: World, variant: dict[str, Any], settings: Settings, choice: Choice, size: str, length: int, gpu: Machine) -> tuple[Any, Any, Pieces, AdamW]:
    """The sharded model with random weights, its configuration, how its blocks are computed, and the optimizer."""
    config = model.load_config(settings.model, int(NAMED_SIZES[size]["vocab_size"]))
    precision = str(variant.get("precision", "auto"))
    pieces = choose(config, world.device, str(variant.get("blocks", "auto")), precision, length, document_mask=False)
    net = model.build_empty(config)
    parallel.prepare_blocks(net, choice.activation_checkpointing, pieces)
    compute_dtype = torch.float32 if precision == "fp32" or world.device.type != "cuda" else torch.bfloat16
    reduce_dtype = torch.bfloat16 if choice.reduce_dtype == "bf16" else torch.float32
    mesh, together = parallel.make_mesh(world, choice.parallel), blocks_together(ModelShape.of(config.to_dict()), gpu, choice, choice.micro_batch * length)
    parallel.shard(net, mesh, reshard=choice.reshard, compute_dtype=compute_dtype, reduce_dtype=reduce_dtype, together=int(variant.get("together", together)))
    model.allocate(net, world.device)
    draw(net, 0)
    return net, config, pieces, make_optimizer(net, settings)


def measure(world: World, variant: dict[str, Any], size: str, length: int, lines: int, profile_to: Path | None) -> dict[str, Any]:
    """Trains ``(lines + 1) * BESIDE`` steps and returns what was seen."""
    micro_batch, recompute = int(variant.get("microBatch", 16)), str(variant.get("recompute", "none"))
    rows = int(variant.get("rows", micro_batch))
    count = (lines + 1) * BESIDE
    settings = Settings(
        data="random", model=ModelSettings(random=size), steps=count, tokens_per_step=rows * length, log_every=BESIDE, checkpoint_every=10**9,
        loss_chunk=int(variant.get("lossChunk", Settings.loss_chunk)), warmup_steps=0, learning_rate=1e-5,
    )  # fmt: skip
    on_gpu = world.device.type == "cuda"
    choice = Choice("fsdp", bool(variant.get("reshard", False)), str(variant.get("reduce", "fp32")), recompute, micro_batch)
    net, config, pieces, optimizer = build(world, variant, settings, choice, size, length, this_machine(world.device.type))
    seen: list[StepMetrics] = []
    profiler: Any = None

    def after_step(done: int) -> None:
        nonlocal profiler
        if profile_to is None:
            return
        if done == count - 2:
            profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU])
            profiler.__enter__()
        if done == count - 1:
            if on_gpu:
                torch.cuda.synchronize()
            profiler.__exit__(None, None, None)

    began, shape = time.perf_counter(), ModelShape.of(config.to_dict())
    planned = pieces.blocks == "fast" and replayed(shape, Cluster(1, world.size, this_machine(world.device.type)), micro_batch * length, rows // micro_batch)
    with preferred_kernels(), tempfile.TemporaryDirectory() as folder:
        batches = steps(rows, micro_batch, length, config.vocab_size, count)
        loop.train(
            net, optimizer, batches, settings, world, last_step=count, reshard=choice.reshard, on_line=seen.append, after_step=after_step,
            replay=Replay(net, settings, world, place(folder), print) if variant.get("replay", planned) else None,
        )  # fmt: skip
    speeds = [line.tokens_per_second_per_gpu for line in seen[1 : -1 if profile_to else None]]
    result = {
        **variant, "pieces": str(pieces), "tokensPerSecond": round(statistics.median(speeds)), "spread": [round(min(speeds)), round(max(speeds))],
        "losses": [round(line.loss, 5) for line in seen], "gib": round(seen[-1].memory_gib or 0.0, 2), "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    if on_gpu:
        result["mfu"] = round(mfu(statistics.median(speeds), shape, length, this_machine("cuda").peak_tflops * 1e12), 4)
        result["smi"] = card([0])
    if profiler is not None and profile_to is not None:
        result["kernels"] = kernels_of(profiler, profile_to)
    return result


def pretend(ranks: int, variant: dict[str, Any], size: str, length: int) -> dict[str, Any]:
    """Peak memory of one of ``ranks`` workers under FSDP2, on this GPU alone: the collectives of PyTorch's fake process group move nothing.

    Nothing that is computed means anything. Under a memory limit (``PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.157``) it shows whether
    a layout fits a smaller card.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    world = World(0, ranks, 0, ranks, ("here",), device)
    micro_batch, accumulated = int(variant.get("microBatch", 1)), int(variant.get("accumulation", 2))
    tokens = micro_batch * accumulated * ranks * length
    settings = Settings(data="random", model=ModelSettings(random=size), tokens_per_step=tokens)
    choice = Choice("fsdp", bool(variant.get("reshard", False)), str(variant.get("reduce", "fp32")), str(variant.get("recompute", "none")), micro_batch)
    l4s = Cluster(ranks, 1, machine("l4"))
    net, config, pieces, optimizer = build(world, variant, settings, choice, size, length, l4s.machine)
    for step in steps(micro_batch * accumulated, micro_batch, length, config.vocab_size, 2):
        loop.forward_backward(net, step, settings, world, choice.reshard)
        optimizer.update(divisor(optimizer.gradient_norm(), 1.0))
        optimizer.zero_grad(set_to_none=True)
    planned = estimate(ModelShape.of(config.to_dict()), l4s, choice, tokens, length, settings.loss_chunk).memory
    seen = round(loop.peak_memory_gib(device), 2)
    return {**variant, "ranks": ranks, "pieces": str(pieces), "gib": seen, "planned": round(planned.total - planned.overhead, 2)}


def kernels_of(profiler: Any, folder: Path) -> dict[str, float]:
    """Milliseconds by kernel name in the profiled step; the whole list goes to ``folder``/kernels.txt."""
    times: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in profiler.events():
        if event.device_type == torch._C._autograd.DeviceType.CUDA:
            times[event.name] += event.device_time / 1000 if hasattr(event, "device_time") else event.cuda_time / 1000
            calls[event.name] += 1
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(times.items(), key=lambda item: -item[1])
    (folder / "kernels.txt").write_text("".join(f"{ms:10.3f} ms {calls[name]:6d} x {name}\n" for name, ms in ordered))
    return {name[:60]: round(ms, 2) for name, ms in ordered[:30]}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variants", default="[{}]", help="JSON list")
    parser.add_argument("--model", default="qwen2.5-1.5b")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--lines", type=int, default=4, help=f"measurements of {BESIDE} steps each (default: %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pretend-ranks", type=int, metavar="N", help="only the memory of one of N workers, whose collectives move nothing")
    parser.add_argument("--profile", type=Path, help="folder for the profile of the last variant")
    args = parser.parse_args()
    variants = json.loads(args.variants)
    if args.pretend_ranks:
        for variant in variants:
            try:
                result = pretend(args.pretend_ranks, variant, args.model, args.sequence_length)
            except torch.OutOfMemoryError as error:
                result = {**variant, "error": f"{error}".splitlines()[0]}
            dist.destroy_process_group()
            sys.stdout.write(json.dumps(result) + "\n")
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        return 0
    with process_group(args.device, 600) as world:
        for i, variant in enumerate(variants):
            if world.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                last = args.profile if i == len(variants) - 1 else None
                result = measure(world, variant, args.model, args.sequence_length, args.lines, last)
            except torch.OutOfMemoryError as error:
                result = {**variant, "error": f"{error}".splitlines()[0]}
            if world.is_main:
                sys.stdout.write(json.dumps(result) + "\n")
                sys.stdout.flush()
            gc.collect()
            if world.device.type == "cuda":
                torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
