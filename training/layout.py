"""Which layout a run takes: what the settings fix, and what the plan decides of the rest on the machines that are there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from training import plan, replay, room
from training.checks import Checked
from training.errors import BadInput
from training.fast.choose import Pieces
from training.flops import ModelShape
from training.settings import Settings
from training.world import World


class Layout(NamedTuple):
    """The plan's choice, the blocks of one FSDP unit, and whether steps are replayed as a CUDA graph."""

    choice: plan.Choice
    together: int
    replayed: bool


def compute_dtype(settings: Settings, world: World) -> torch.dtype:
    """What a block computes in, where it is not fp8: bf16 on GPUs unless the settings say otherwise, float32 on CPUs."""
    bf16 = settings.precision in ("bf16", "fp8") or (settings.precision == "auto" and world.device.type == "cuda")
    return torch.bfloat16 if bf16 else torch.float32


def shape(job: Checked) -> ModelShape:
    """The model's sizes, as the plan counts with them."""
    return ModelShape.of(job.config.to_dict())


def cluster(world: World, machine: plan.Machine) -> plan.Cluster:
    """``world`` as the plan knows it; where hosts hold unequal numbers of workers, each counts as alone on its host, which no layout is built on."""
    return plan.Cluster(len(world.hosts), world.local_size, machine) if world.even else plan.Cluster(world.size, 1, machine)


def choose(job: Checked, world: World, pieces: Pieces, say: Callable[[str], None]) -> Layout:
    """The plan's choice for ``world``, within what the settings fix. Raises BadInput where nothing fits, there or on ``minWorkers``.

    For rank 0: a GPU that the plan does not know is measured, and each rank would measure something else.
    """
    s = job.settings

    def fixed(value: str) -> str | None:
        return None if value == "auto" else value

    blocks = "fp8" if pieces.fp8 else "fast" if pieces.blocks == "fast" else "compiled"
    machine = plan.this_machine(world.device.type, compute_bytes=compute_dtype(s, world).itemsize, blocks=blocks)
    workers = cluster(world, machine)
    parallel = fixed(s.parallel)
    if parallel == "hsdp" and s.min_workers is not None and not world.even:
        parallel = "fsdp"
        say(f"parallel = hsdp needs as many workers on each host, and {world.size} workers on {len(world.hosts)} hosts are not: fsdp until they are")
    wanted = plan.Fixed(
        parallel=parallel,
        reshard=None if s.reshard == "auto" else s.reshard == "yes",
        reduce_dtype=fixed(s.reduce_dtype),
        activation_checkpointing=fixed(s.activation_checkpointing),
        micro_batch=s.micro_batch,
        micro_batch_below=room.too_large(job.folder),
    )
    choice, _ = plan.choose(shape(job), workers, s.tokens_per_step, job.sequence_length, wanted, s.loss_chunk)
    if s.min_workers is not None and s.min_workers < world.size:
        # Refused now, and not hours later when a host is lost.
        a_host = min(s.min_workers, world.local_size)
        even = s.min_workers % a_host == 0
        fewest = plan.Cluster(s.min_workers // a_host, a_host, machine) if even else plan.Cluster(s.min_workers, 1, machine)
        try:
            small = wanted if even else dataclasses.replace(wanted, parallel="fsdp")
            plan.choose(shape(job), fewest, s.tokens_per_step, job.sequence_length, small, s.loss_chunk)
        except BadInput as error:
            raise BadInput(f"minWorkers = {s.min_workers} is too few: {error}. Raise minWorkers") from error
    tokens, micro_steps = choice.micro_batch * job.sequence_length, plan.accumulation(workers, s.tokens_per_step, job.sequence_length, choice.micro_batch)
    replays = plan.replayed(shape(job), workers, tokens, micro_steps) and not replay.failed_before(job.folder)
    return Layout(choice, plan.blocks_together(shape(job), machine, choice, tokens), replays)
