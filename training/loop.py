"""The training loop: from batches to updated weights. Everything around it (data, model, record, resume) is in worker.py."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training import parallel
from training.data import MicroBatch, Step
from training.divergence import Diverged, Spikes, not_finite
from training.optimizer import AdamW, divisor
from training.record import StepMetrics
from training.schedule import learning_rate
from training.settings import Settings
from training.stragglers import Exchanges, Shares
from training.watchdog import BETWEEN, DATA, STEP, Idle
from training.world import World

NOBODY = Idle()


def train(
    model: Any,
    optimizer: AdamW,
    batches: Iterable[Step],
    settings: Settings,
    world: World,
    *,
    last_step: int,
    reshard: bool,
    on_line: Callable[[StepMetrics], None],
    after_step: Callable[[int], None],
    on_shares: Callable[[Shares], None] = lambda _: None,
    watch: Idle = NOBODY,
    spikes: Spikes | None = None,
    replay: Callable[[Step], Tensor] | None = None,
) -> None:
    """Steps until ``last_step``. ``on_line`` is called on every rank every ``log_every`` steps, ``on_shares`` with it, and ``after_step(steps done)``
    after each step; ``replay`` does what :func:`forward_backward` does otherwise.

    No value travels from the GPU to the CPU between two lines. Raises Diverged on all ranks at a loss or gradient that is not finite, or a spike.
    """
    exchanges, spikes = Exchanges(world.device), spikes or Spikes(settings.spike_factor)
    if world.size > 1:
        exchanges.install(model)
    loss_sum = torch.zeros((), device=world.device)
    wait, counted, began = 0.0, 0, time.perf_counter()
    norm: Tensor | None = None
    watch.doing = DATA
    for batch in batches:
        watch.doing = STEP
        done = batch.index + 1
        # A checkpoint's step is always a line's too: what is not finite must not be saved.
        is_line = done % settings.log_every == 0 or done % settings.checkpoint_every == 0 or done == last_step
        exchanges.begin(is_line)
        rate = learning_rate(batch.index, settings)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss_sum += replay(batch) if replay else forward_backward(model, batch, settings, world, reshard, exchanges)
        with exchanges.timed():
            norm = optimizer.gradient_norm()
        optimizer.update(divisor(norm, settings.grad_clip))
        optimizer.zero_grad(set_to_none=True)
        exchanges.on = False
        watch.ended(done)
        watch.doing = BETWEEN
        wait, counted = wait + batch.wait_seconds, counted + 1
        if is_line:
            loss, grad_norm, waited, data_wait = _shared(loss_sum / counted, norm, exchanges.take(), wait / counted, world)
            wrong = not_finite(loss, grad_norm) or spikes.judge(loss)
            if wrong:
                raise Diverged(done, wrong)
            seconds = (time.perf_counter() - began) / counted
            on_line(
                StepMetrics(
                    step=done,
                    loss=loss,
                    grad_norm=grad_norm,
                    learning_rate=rate,
                    tokens=done * settings.tokens_per_step,
                    tokens_per_second=settings.tokens_per_step / seconds,
                    tokens_per_second_per_gpu=settings.tokens_per_step / seconds / world.size,
                    step_seconds=seconds,
                    data_wait=wait / counted,
                    memory_gib=peak_memory_gib(world.device),
                )
            )
            on_shares(Shares(counted, seconds, waited, data_wait))
            loss_sum.zero_()
            wait, counted, began = 0.0, 0, time.perf_counter()
        before = time.perf_counter()
        after_step(done)
        began += time.perf_counter() - before  # checkpoints and evaluations are not part of a step's time
        if done >= last_step:
            return
        watch.doing = DATA


def forward_backward(model: Any, batch: Step, settings: Settings, world: World, reshard: bool, exchanges: Exchanges | None = None) -> Tensor:
    """Gradients of the mean loss over the global batch; returns this rank's part of that mean (the parts of all ranks sum to it).

    The divisor is the number of valid tokens of *all* ranks: a mean of per-rank means would weigh tokens unequally. FSDP divides
    gradients by the number of ranks, hence the factor ``world.size``.
    """
    valid = torch.tensor(float(batch.valid_tokens), device=world.device)
    with exchanges.timed() if exchanges else contextlib.nullcontext():
        dist.all_reduce(valid)
    return gradients(model, batch.micro_batches, valid.clamp_(min=1.0), settings, world, reshard)


def gradients(model: Any, micro_batches: Sequence[MicroBatch], valid: Tensor, settings: Settings, world: World, reshard: bool) -> Tensor:
    """The part of :func:`forward_backward` that is all GPU: ``valid`` [scalar, float32] tokens of all ranks divide the sums of the losses."""
    total = torch.zeros((), device=world.device)
    for i, micro in enumerate(micro_batches):
        if len(micro_batches) > 1:  # the last one's values are FSDP's own, and to set them means to visit each module
            last = i == len(micro_batches) - 1
            model.set_is_last_backward(last)
            model.set_requires_all_reduce(last)  # hsdp: hosts exchange gradients once a step, not once a micro-batch
            model.set_reshard_after_backward(reshard or last)
        loss = token_loss(model, micro, settings.loss_chunk, world.device)
        (loss * (world.size / valid)).backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total / valid


def token_loss(model: Any, micro: MicroBatch, chunk: int, device: torch.device) -> Tensor:
    """Sum of the token losses of one micro-batch: a float32 scalar on ``device``."""
    ids, labels, positions = (None if t is None else t.to(device, non_blocking=True) for t in micro)
    loss: Tensor = model.token_loss(ids, labels, positions, chunk)
    return loss


def evaluate(model: Any, batches: Iterable[MicroBatch], settings: Settings, world: World) -> float:
    """Mean loss (nats per token) over held-out rows, all ranks together."""
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    model.eval()
    with torch.no_grad():
        for micro in batches:
            sums[0] += token_loss(model, micro, settings.loss_chunk, world.device)
            sums[1] += (micro.labels != -100).sum().to(world.device)
    model.train()
    parallel.reshard(model)
    dist.all_reduce(sums)
    total, count = sums.tolist()
    return float(total / max(count, 1.0))


def _shared(loss: Tensor, norm: Tensor, waited: float, data_wait: float, world: World) -> tuple[float, float, tuple[float, ...], tuple[float, ...]]:
    """Loss summed over ranks and the gradient norm as numbers, and what each rank waited: the one host sync of a line, and one collective."""
    table = torch.zeros(2, world.size, dtype=loss.dtype)
    table[:, world.rank] = torch.tensor([waited, data_wait])
    shared = torch.cat([loss.reshape(1), table.flatten().to(loss.device)])
    dist.all_reduce(shared)
    numbers = _numbers(torch.cat([shared, norm.reshape(1).to(loss.dtype)]))
    return numbers[0], numbers[-1], tuple(numbers[1 : 1 + world.size]), tuple(numbers[1 + world.size : -1])


def _numbers(values: Tensor) -> list[float]:
    """``values`` on the CPU. By way of pinned memory: in a copy to any other CUDA waits for the GPU with its locks held, and where the GPU hangs
    nobody could ask it anything more (the watchdog, NCCL's record).
    """
    if values.device.type != "cuda":
        return list(values.tolist())
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    torch.cuda.current_stream(values.device).synchronize()
    return list(host.tolist())


def peak_memory_gib(device: torch.device) -> float:
    """Peak memory of this process so far, in GiB: allocated on the GPU, or resident where there is none."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device)) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
