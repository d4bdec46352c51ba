"""A tiny model on made-up rows, trained by the project's own functions: what the numeric tests compare."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from training import checkpoint, loop, model, parallel
from training.data import MicroBatch, Step, accumulation
from training.fast.choose import Pieces
from training.loss import IGNORE
from training.optimizer import AdamW, make_optimizer
from training.settings import ModelSettings, Settings
from training.storage import place
from training.world import World

LENGTH, ROWS, VOCABULARY = 24, 12, 211
CONFIG = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}


@dataclasses.dataclass(frozen=True)
class Case:
    model_type: str = "qwen2"
    tied: bool = True
    parallel: str = "fsdp"
    reshard: bool = True
    recompute: str = "none"
    micro_batch: int = 2
    reduce_dtype: str = "fp32"
    compute_dtype: str = "fp32"
    uneven: bool = False
    steps: int = 4
    stop_after: int | None = None
    save_at: tuple[int, ...] = ()
    folder: str = ""
    attempt: int = 1
    asynchronous: bool = False
    resume: bool = False
    keep: int = 2
    blocks: str = "plain"
    fp8: bool = False
    together: int = 1

    @property
    def settings(self) -> Settings:
        random = {**CONFIG, "model_type": self.model_type, "tie_word_embeddings": self.tied}
        return Settings(
            data="unused",
            model=ModelSettings(random=random),
            steps=self.steps,
            tokens_per_step=ROWS * LENGTH,
            log_every=1,
            warmup_steps=1,
            learning_rate=1e-2,
            loss_chunk=20,
            seed=3,
        )


def rows_of(step: int, uneven: bool) -> tuple[Tensor, Tensor]:
    """Inputs and labels [ROWS, LENGTH] of a global batch; uneven: from none to all of a row's labels are left out."""
    generator = torch.Generator().manual_seed(100 + step)
    rows = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    labels = rows[:, 1:].clone()
    if uneven:
        for i in range(ROWS):
            labels[i, : (i * 7 + step) % (LENGTH + 1)] = IGNORE
    return rows[:, :-1].clone(), labels


def batch_of(step: int, world_size: int, rank: int, micro_batch: int, uneven: bool) -> Step:
    ids, labels = (t[rank::world_size] for t in rows_of(step, uneven))
    count = accumulation(ROWS, micro_batch, world_size)
    short = count * micro_batch - len(ids)
    ids = torch.cat([ids, torch.zeros(short, LENGTH, dtype=torch.int64)])
    labels = torch.cat([labels, torch.full((short, LENGTH), IGNORE)])
    micros = [MicroBatch(i, y, None) for i, y in zip(ids.split(micro_batch), labels.split(micro_batch), strict=True)]
    return Step(step, micros, int((labels != IGNORE).sum()), 0.0)


def build(world: World, case: Case) -> tuple[Any, Any, AdamW]:
    """(configuration, sharded model with the seed's weights, optimizer)."""
    config = model.load_config(case.settings.model, VOCABULARY)
    net = model.build_empty(config)
    parallel.prepare_blocks(net, case.recompute, Pieces(case.blocks, case.fp8, "as set"))
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    parallel.shard(
        net,
        parallel.make_mesh(world, case.parallel),
        reshard=case.reshard,
        compute_dtype=dtypes[case.compute_dtype],
        reduce_dtype=dtypes[case.reduce_dtype],
        together=case.together,
    )
    model.allocate(net, world.device)
    model.fill(net, world.on_main(lambda: model.full_weights(case.settings.model, config, case.settings.seed)), world)
    model.check_master_weights(net)
    return config, net, make_optimizer(net, case.settings)


def train(world: World, case: Case) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of each step, by the project's loop."""
    _, net, optimizer = build(world, case)
    checkpoints, start = None, 0
    if case.folder:
        folder = place(case.folder) / "checkpoints"
        found = checkpoint.latest(folder, world, print) if case.resume else None
        checkpoints = checkpoint.Checkpointer(folder, world, case.attempt, case.keep, asynchronous=case.asynchronous)
        if found:
            checkpoints.load(found, net, optimizer)
            start = found.step
    lines: list[tuple[int, float, float]] = []

    def after_step(done: int) -> None:
        if checkpoints is not None and done in case.save_at:
            checkpoints.save(done, net, optimizer, {"note": "test"})
        if checkpoints is not None:
            checkpoints.poll()

    batches = (batch_of(step, world.size, world.rank, case.micro_batch, case.uneven) for step in range(start, case.steps))
    loop.train(
        net,
        optimizer,
        batches,
        case.settings,
        world,
        last_step=case.stop_after or case.steps,
        reshard=case.reshard,
        on_line=lambda line: lines.append((line.step, line.loss, line.grad_norm)),
        after_step=after_step,
    )
    if checkpoints is not None:
        checkpoints.wait()
    return lines


def reference(case: Case) -> list[tuple[int, float, float]]:
    """The same steps in plain PyTorch: no sharding, no accumulation, full logits, one batch."""
    from transformers import AutoModelForCausalLM

    from training.schedule import learning_rate

    settings = case.settings
    config = model.load_config(settings.model, VOCABULARY)
    net = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    net.load_state_dict(dict(model.full_weights(settings.model, config, settings.seed)))
    groups = [
        {"params": [p for p in net.parameters() if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in net.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2))
    lines = []
    for step in range(case.steps):
        ids, labels = rows_of(step, case.uneven)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        logits = net(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), settings.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        lines.append((step + 1, loss.item(), norm.item()))
    return lines
