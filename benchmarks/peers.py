"""What a user would run instead, on the same model shape and random tokens: one variant a process, one line of JSON.

    python -m benchmarks.peers hf --rows 8            Hugging Face Trainer (hf_liger: with Liger's kernels)
    python -m benchmarks.peers fsdp2 --rows 8         a plain FSDP2 loop (fsdp2_tuned: compiled blocks and Liger's fused cross-entropy)
    python -m benchmarks.peers sample --rows 8        the way of AWS's public sample: Ray Train, FSDP1 wrapped by size, a report a step

All hold their weights and AdamW's states in bf16, as their users do; this project's are float32.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import logging
import os
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

from training.flops import ModelShape, mfu
from training.sizes import NAMED_SIZES

PEAK = 989e12
"""FLOP/s of a Hopper GPU in dense bf16 (NVIDIA's data sheet)."""

VARIANTS = ("hf", "hf_liger", "fsdp2", "fsdp2_tuned", "sample")


def build(size: str) -> Any:
    """The model with random bf16 weights on the GPU (on the CPU in float32)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = dict(NAMED_SIZES[size])
    config = AutoConfig.for_model(raw.pop("model_type"), **raw, use_cache=False)
    config._attn_implementation = "sdpa"
    on_gpu = torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if on_gpu else torch.float32)  # type: ignore[no-untyped-call]
    return model.train()


def told(args: argparse.Namespace, speed: float, model: Any) -> None:
    """Prints the line, on rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        shape = ModelShape.of(model.config.to_dict())
        gib = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        line = {"variant": args.variant, "tokensPerSecond": round(speed, 1), "mfu": round(mfu(speed, shape, args.length, PEAK), 4), "gib": round(gib, 1)}
        sys.stdout.write("RESULT " + json.dumps(line) + "\n")
        sys.stdout.flush()


def settle() -> float:
    """A time, when the GPU has done all it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def hugging_face(args: argparse.Namespace) -> None:
    """The Trainer, with its own defaults but for fused AdamW."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    logging.disable(logging.WARNING)
    model = build(args.model)
    words, warm_up, steps = model.config.vocab_size, args.warm_up, args.steps

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, _index: int) -> dict[str, torch.Tensor]:
            tokens = torch.randint(0, words, (args.length,))
            return {"input_ids": tokens, "labels": tokens}

    class Clock(TrainerCallback):
        began = ended = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == warm_up:
                self.began = settle()
            if state.global_step == warm_up + steps:
                self.ended = settle()

    sharded: dict[str, Any] = {}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}}
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            output_dir=scratch, per_device_train_batch_size=args.rows, max_steps=args.warm_up + args.steps, bf16=torch.cuda.is_available(),
            optim="adamw_torch_fused", logging_strategy="no", save_strategy="no", report_to=[], use_liger_kernel=args.variant == "hf_liger",
            dataloader_num_workers=2, disable_tqdm=True, **sharded,
        )  # fmt: skip
        Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[clock]).train()
    told(args, args.rows * args.length * args.steps / (clock.ended - clock.began), model)


def fsdp2(args: argparse.Namespace) -> None:
    """A loop as in FSDP2's tutorial."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from training.world import process_group

    tuned = args.variant == "fsdp2_tuned"
    if tuned:
        liger: Any = importlib.import_module("liger_kernel.transformers")  # installed for this comparison only
        liger.apply_liger_kernel_to_qwen2(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True, cross_entropy=False)
    with process_group("auto", 600) as world:
        mesh = init_device_mesh(world.device.type, (world.size,))
        model = build(args.model)
        for layer in model.model.layers:
            if tuned:
                layer.compile()
            fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=not args.no_reshard)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=not args.no_reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        began = 0.0
        for step in range(args.warm_up + args.steps):
            if step == args.warm_up:
                began = settle()
            tokens = torch.randint(0, model.config.vocab_size, (args.rows, args.length), device=world.device)
            model(input_ids=tokens, labels=tokens).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        told(args, args.rows * args.length * args.steps / (settle() - began), model)


def _sample_worker(settings: dict[str, Any]) -> None:
    import ray.train
    import ray.train.torch
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    args = argparse.Namespace(**settings)
    device = ray.train.torch.get_device()
    model = build(args.model)
    config = model.config
    if device.type == "cuda":
        policy = {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=int(1e7))}
        model = ray.train.torch.prepare_model(model, parallel_strategy="fsdp", parallel_strategy_kwargs=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    seconds = 0.0
    for step in range(args.warm_up + args.steps):
        began = settle()
        tokens = torch.randint(0, config.vocab_size, (args.rows, args.length), device=device)
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        if step >= args.warm_up:
            seconds += settle() - began
        ray.train.report({"step": step, "loss": loss.item()})
    model.config = config
    told(args, args.rows * args.length * args.steps / seconds, model)


def sample(args: argparse.Namespace) -> None:
    """One Ray Train worker a GPU; the time of ``report`` is not counted."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(address="local", include_dashboard=False)
    with tempfile.TemporaryDirectory() as scratch:
        scaling = ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available())
        TorchTrainer(_sample_worker, train_loop_config=vars(args), scaling_config=scaling, run_config=RunConfig(storage_path=scratch)).fit()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--model", default="qwen2.5-1.5b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="of the sample's way; the others are started by torchrun")
    parser.add_argument("--no-reshard", action="store_true", help="fsdp2: keep gathered weights")
    args = parser.parse_args()
    {"hf": hugging_face, "hf_liger": hugging_face, "fsdp2": fsdp2, "fsdp2_tuned": fsdp2, "sample": sample}[args.variant](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
