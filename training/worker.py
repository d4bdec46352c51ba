"""What each process of a run does around the loop: data, model, record, resume, evaluation, export."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import math
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from training import checkpoint, checks, divergence, layout, loop, model, optimizer, parallel, plan, room, schema, stragglers, watchdog
from training.checks import Checked
from training.data import Batches, MicroBatch, Step, eval_batches
from training.divergence import Diverged
from training.errors import JobError, OneRankFailed, Terminated, TrainingFailed
from training.export import export
from training.fast.attention import preferred_kernels
from training.fast.choose import Pieces
from training.fast.choose import choose as choose_pieces
from training.flops import mfu
from training.network import Network
from training.notice import Notice, Watch
from training.record import RunRecord, StepMetrics, fail_for, now, open_run
from training.replay import Replay
from training.settings import Settings
from training.storage import place
from training.world import World

Rows = TypeVar("Rows", Step, MicroBatch)


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What a launcher gives its workers. ``say`` speaks to the person (rank 0 only calls it); ``on_metrics`` gets rank 0's lines;
    ``on_checkpoint(step, metrics)`` is called on every rank after a checkpoint was begun; ``guard(lost)`` is entered by rank 0 while it
    trains: where the launcher finds that nobody is left to hear of this run's end, it calls ``lost(reason)`` and ends the process.
    ``blame()`` tells what the launcher knows of the cause of a failure, None where it knows nothing.
    ``notice()`` is called on all ranks at the same steps: what the launcher was told of these processes' end, None where nothing;
    ``saved(notice)`` on all of them when the checkpoint for it is complete. If it returns, training goes on."""

    say: Callable[[str], None]
    on_metrics: Callable[[Mapping[str, float]], None] = lambda _: None
    on_checkpoint: Callable[[int, Mapping[str, float]], None] = lambda _step, _metrics: None
    blame: Callable[[], str | None] = lambda: None
    guard: Callable[[Callable[[str], None]], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
    notice: Callable[[], Notice | None] = lambda: None
    saved: Callable[[Notice], None] = lambda _: None


def run_rank(settings: Settings, world: World, hooks: Hooks) -> dict[str, Any]:
    """One rank's whole run. Returns a summary of plain data: run, folder, step, loss, evalLoss, perplexity, tokensPerSecond, resumedFrom.

    A collective: every rank calls it with the same settings. Raises JobError on all ranks alike; OneRankFailed, or anything else, on one.
    """
    say = hooks.say if world.is_main else _silent
    job = world.together(lambda: checks.check_again(settings, say))
    pieces = world.together(lambda: choose_pieces(job.config, world.device, settings.blocks, settings.precision, job.sequence_length, settings.document_mask))
    chosen = world.broadcast(world.on_main(lambda: layout.choose(job, world, pieces, say)))
    assert chosen is not None
    checks.share_storage(job, world, say)
    run = _Run(job, world, hooks, say, pieces, chosen)
    try:
        run.to_the_end()
    except Exception as error:
        run.failed(error)
    finally:
        run.guards.close()
    return run.summary()


class _Run:
    """One rank's part of a run. Its methods are collectives, but for :meth:`failed` and what the loop's threads call (:meth:`on_hang`)."""

    def __init__(self, job: Checked, world: World, hooks: Hooks, say: Callable[[str], None], pieces: Pieces, chosen: layout.Layout) -> None:
        self.job, self.world, self.hooks, self.say, self.pieces, self.layout = job, world, hooks, say, pieces, chosen
        choice = self.choice = chosen.choice
        settings = self.settings = job.settings
        self.net = model.build_empty(job.config)
        self.products = parallel.prepare_blocks(self.net, choice.activation_checkpointing, pieces)
        mesh = world.together(lambda: parallel.make_mesh(world, choice.parallel))
        reduce_dtype = torch.bfloat16 if choice.reduce_dtype == "bf16" else torch.float32
        parallel.shard(
            self.net,
            mesh,
            reshard=choice.reshard,
            compute_dtype=layout.compute_dtype(settings, world),
            reduce_dtype=reduce_dtype,
            together=chosen.together,
        )
        model.allocate(self.net, world.device)
        self.optimizer = optimizer.make_optimizer(self.net, settings)

        folder = job.folder / "checkpoints"
        self.found = checkpoint.latest(folder, world, say, settings.storage_patience)
        self.start_step = self.found.step if self.found else 0
        self.record = world.on_main(lambda: _open_record(job, world, self.start_step, chosen, pieces, say))
        self.attempt = world.broadcast(self.record.attempt if self.record else 0)
        self.network = Network(job, world, choice, self.attempt, say, self.record)
        in_background = world.device.type == "cuda"
        self.checkpoints = checkpoint.Checkpointer(
            folder, world, self.attempt, settings.keep_checkpoints, asynchronous=in_background, patience=settings.storage_patience, say=say
        )
        self.watch = Watch(world, hooks.notice, self.start_step)
        self.expected: Notice | None = None
        skips = world.broadcast(world.on_main(lambda: divergence.read_skips(job.folder)))
        self.skips = skips or []
        self.tally = stragglers.Tally(world.gather(socket.gethostname()))
        self.hang: watchdog.Idle = loop.NOBODY
        self.latest: dict[str, float] = {}
        # Steps done, for the record; since when, and from which step, the time that is left is estimated.
        self.step_done, self.began, self.first = self.start_step, time.monotonic(), self.start_step
        self.rows = settings.tokens_per_step // job.sequence_length
        self.eval_rows = min(settings.eval_rows, job.data.rows("eval"))
        self.guards = contextlib.ExitStack()
        self.guards.callback(job.data.close)
        self.guards.callback(self.checkpoints.close)
        if self.record is not None:
            closing = self.record.close
            self.guards.enter_context(hooks.guard(lambda reason: closing("failed", self.step_done, reason)))

    def to_the_end(self) -> None:
        """From the newest checkpoint, or the weights of the beginning, to the exported model."""
        self.network.check()
        self.load()
        self.say(_opening(self.job, self.world, self.choice, self.net))
        self.say(str(self.pieces))
        if self.layout.replayed:
            self.say("steps are replayed as a CUDA graph: the GPU would wait for its host")
        self.began = time.monotonic()
        if self.start_step < self.job.last_step:
            self.train()
        else:
            self.say(f"step {self.start_step} is already done; nothing is left to train")
            if self.eval_rows:
                self.evaluate(self.start_step)
        self.checkpoints.finish(self.net, self.optimizer)
        self.step_done = max(self.start_step, self.job.last_step)
        if self.settings.export:
            self.export()

    # ---- before the first step

    def load(self) -> None:
        """Weights, moments and the step to begin with; then tries whether a step fits the GPU."""
        job, world, settings = self.job, self.world, self.settings
        self.checkpoints.reserve(self.net)
        loaded = self.checkpoints.load_newest(self.found, self.net, self.optimizer)
        if loaded is not self.found:
            self.found, self.start_step = loaded, loaded.step if loaded else 0
            self.step_done = self.first = self.start_step
            self.keep(lambda record: record.rewind(self.start_step))
        if loaded:
            self.say(f"resuming {job.run} from step {loaded.step} (written by {loaded.facts['worldSize']} workers, now {world.size})")
        else:
            self.fill()
        model.check_master_weights(self.net)
        if world.device.type == "cuda":
            choice = self.choice
            with preferred_kernels():
                room.check(
                    self.net,
                    self.optimizer,
                    settings,
                    world,
                    job.folder,
                    size=choice.micro_batch,
                    length=job.sequence_length,
                    rows=self.rows,
                    reshard=choice.reshard,
                )
            for block in self.products:
                block.forget()

    def fill(self) -> None:
        """The weights of the beginning: the pretrained model's, or random ones."""
        weights = self.world.on_main(lambda: model.full_weights(self.settings.model, self.job.config, self.settings.seed))
        model.fill(self.net, weights, self.world)

    # ---- training

    def train(self) -> None:
        """All steps; where the loss breaks, ends with Diverged or goes back and on with other rows, as the settings say."""
        settings = self.settings
        spikes, after = divergence.Spikes(settings.spike_factor), self.start_step
        with _settled(), self.watchdog() as self.hang:
            for rollbacks in range(settings.max_rollbacks + 1):
                try:
                    self.steps(after, spikes)
                    return
                except Diverged as bad:
                    if settings.on_divergence == "stop":
                        raise
                    if rollbacks == settings.max_rollbacks:
                        raise bad.after(rollbacks) from bad
                    self.hang.pausing("going back to a checkpoint")
                    after = self.go_back(bad)
                    self.hang.pausing(None)

    def steps(self, after: int, spikes: divergence.Spikes) -> None:
        """The steps after ``after``. Raises Diverged on all ranks."""
        job, world, settings, choice = self.job, self.world, self.settings, self.choice
        reader = Batches(
            job.data,
            "train",
            self.rows,
            choice.micro_batch,
            world.size,
            world.rank,
            settings.seed,
            after,
            settings.document_mask,
            skipped=divergence.ranges(self.skips),
            pin=world.device.type == "cuda",
        )
        with reader as batches, preferred_kernels():
            loop.train(
                self.net,
                self.optimizer,
                self.read(batches),
                settings,
                world,
                last_step=job.last_step,
                reshard=choice.reshard,
                on_line=self.on_line,
                after_step=self.after_step,
                on_shares=self.tally.add,
                watch=self.hang,
                spikes=spikes,
                replay=Replay(self.net, settings, world, job.folder, self.say) if self.layout.replayed else None,
            )

    def read(self, batches: Iterator[Rows]) -> Iterator[Rows]:
        """``batches``. A row that can't be read is one rank's alone: the others wait for it in a collective, and nothing more can be done together."""
        try:
            yield from batches
        except JobError as error:
            if self.world.size == 1:
                raise
            raise OneRankFailed(f"{error}") from error

    def on_line(self, line: StepMetrics) -> None:
        """A line of metrics: to the record, the launcher and the person."""
        self.step_done = line.step
        line = dataclasses.replace(line, mfu=_mfu(line, self.job, self.world))
        self.latest.update(loss=line.loss, tokensPerSecond=line.tokens_per_second)
        self.keep(lambda record: record.log(line))
        if self.record is None:
            return
        self.hooks.on_metrics(
            {"step": line.step, "loss": line.loss, "grad_norm": line.grad_norm, "tokens_per_second": line.tokens_per_second, "data_wait": line.data_wait}
        )
        left = (time.monotonic() - self.began) / (line.step - self.first) * (self.job.last_step - line.step)
        self.say(_progress(line, self.job.last_step, left))

    def after_step(self, done: int) -> None:
        """What is due after step ``done``: a verdict on the network, an evaluation, a checkpoint, the answer to a notice."""
        settings, last = self.settings, self.job.last_step
        evaluates = self.eval_rows > 0 and (done == last or (settings.eval_every > 0 and done % settings.eval_every == 0))
        regular = done % settings.checkpoint_every == 0
        # One that is owed waits for a step whose loss is known to be finite, as a regular one's always is.
        saves = done == last or ((regular or done % settings.log_every == 0) and self.checkpoints.is_due(regular))
        if evaluates or saves:
            self.hang.pausing("an evaluation or a checkpoint")
        # After the first step, so that a run on the wrong network costs one step; then the bytes, whenever something
        # else than training is about to use the network.
        if done == self.start_step + 1 or evaluates or saves or (done % settings.log_every == 0 and self.network.is_due()):
            self.network.judge(done)
        if evaluates:
            self.evaluate(done)
        if saves:
            self.save(done)
            self.hooks.on_checkpoint(done, self.latest)
        if done < last:
            self.heed(done, saves)
        if evaluates or saves:
            self.network.mark(done)
        self.hang.pausing(None)
        self.checkpoints.poll()

    def evaluate(self, done: int) -> None:
        """The held-out loss after step ``done``, to the record and the person."""
        job, world = self.job, self.world
        batches = eval_batches(job.data, self.eval_rows, self.choice.micro_batch, world.size, world.rank, self.settings.document_mask)
        loss = loop.evaluate(self.net, self.read(batches), self.settings, world)
        self.latest.update(evalLoss=loss, perplexity=math.exp(min(loss, 700.0)))
        self.keep(lambda record: record.log_evaluation(done, loss))
        self.say(f"step {done}: held-out loss {loss:.4f}, perplexity {self.latest['perplexity']:.2f}")

    def save(self, done: int) -> None:
        """Begins the checkpoint of step ``done``. Raises Diverged where there is something in it that is not finite."""
        if not divergence.all_finite(self.net, self.optimizer):
            raise Diverged(done, "weights or their moments are not finite, though the loss is,")
        facts = {"run": self.job.run, "tokens": done * self.settings.tokens_per_step, "loss": self.latest.get("loss"), "identity": self.job.identity}
        self.checkpoints.save(done, self.net, self.optimizer, facts)

    def heed(self, done: int, is_saved: bool) -> None:
        """Where these processes are about to be ended: a checkpoint of step ``done``, complete before this returns."""
        told = self.watch.look(done)
        if told is None:
            return
        self.step_done = done
        self.hang.pausing("a last checkpoint")
        began, self.expected = time.monotonic(), told
        facts = {"deadline": None if told.deadline is None else f"{datetime.datetime.fromtimestamp(told.deadline, datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"}
        self.keep(lambda record: record.expect(told.outcome, told.reason, step=done, **facts))
        if not is_saved:
            self.save(done)
        self.checkpoints.finish(self.net, self.optimizer)  # storage that refuses it is asked again: there is nothing better to do with the time left
        seconds = self.world.broadcast(time.monotonic() - began)
        self.keep(lambda record: record.expect(told.outcome, told.reason, step=done, save_seconds=round(seconds, 2), **facts))
        self.say(f"{told.reason}; step {done} is saved, in {seconds:.1f} s")
        self.watch.saved(seconds)
        self.hooks.saved(told)

    def go_back(self, bad: Diverged) -> int:
        """Loads the last checkpoint, or the weights of the beginning, and leaves out the data since then; returns its step."""
        job = self.job
        self.checkpoints.wait()
        self.checkpoints.owed = False  # the one of the bad step is not to be made up for
        newest = checkpoint.latest(job.folder / "checkpoints", self.world, self.say, self.settings.storage_patience)
        good = self.checkpoints.load_newest(newest, self.net, self.optimizer)
        if good is None:
            self.optimizer.state.clear()
            self.fill()
        step = good.step if good else 0
        left_out = divergence.bad_range(step, bad.step, divergence.ranges(self.skips))
        entry = {"from": left_out[0], "to": left_out[1], "step": bad.step, "backTo": step, "why": bad.why, "attempt": self.attempt, "time": now()}
        self.skips.append(self.world.broadcast(entry))
        self.world.on_main(lambda: divergence.write_skips(job.folder, self.skips))
        self.keep(lambda record: record.rewind(step, entry))
        self.network.mark(step)
        self.began, self.first, self.step_done = time.monotonic(), step, step
        self.say(f"{bad.why} at step {bad.step}: back to step {step}, and on with other rows ({left_out[1] - left_out[0]} steps of data are left out)")
        return step

    def watchdog(self) -> watchdog.Idle:
        """The watch over this run's steps, or one that watches nothing, as the settings say."""
        s = self.settings
        if s.hang_factor == 0:
            return watchdog.Idle()
        return watchdog.Watchdog(self.world, self.job.folder, self.attempt, self.start_step, s.hang_factor, s.hang_floor, self.on_hang)

    def on_hang(self, text: str, done: int) -> None:
        """Tells of a hang, in the record too; called by a thread of the one rank that speaks for all."""
        self.hooks.say(text)
        if self.record is None:  # rank 0 is the one that is late
            print(text, file=sys.stderr, flush=True)  # noqa: T201 (a launcher without Ray shows what rank 0 says, and no other)
            fail_for(self.job.folder, self.attempt, done, text)
            return
        self.record.note(stragglers=self.tally.slowest())
        self.record.close("failed", done, text)

    # ---- the end

    def export(self) -> None:
        """The model as other programs load it."""
        generation = self.world.on_main(lambda: model.load_generation_config(self.settings.model))
        export(
            self.net,
            self.job.data.tokenizer_folder,
            self.job.folder / "model",
            self.world,
            eos_token_id=self.job.data.manifest.eos_token_id,
            generation=generation,
            patience=self.settings.storage_patience,
            say=self.say,
        )

    def failed(self, raised: Exception) -> None:
        """Closes the record and raises what was raised, or what it means."""
        error = self.network.explain(raised)
        if isinstance(raised, JobError) and not isinstance(raised, OneRankFailed):  # on all ranks alike: the last good checkpoint may still be on its way
            with contextlib.suppress(TrainingFailed):
                self.checkpoints.wait()
        if self.record is not None:
            reason = f"{error}" if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
            blamed = None if isinstance(error, JobError) else self.hooks.blame()
            with contextlib.suppress(TrainingFailed):  # the storage may be what failed; the error itself must be the one that is told
                self.record.note(stragglers=self.tally.slowest())
                if self.expected is not None and (not isinstance(error, JobError) or isinstance(error, Terminated)):
                    self.record.close(self.expected.outcome, self.step_done, self.expected.reason)
                self.record.close("failed", self.step_done, f"{blamed}. {reason}" if blamed else reason)
        raise error from raised if error is not raised else None

    def summary(self) -> dict[str, Any]:
        """Closes the record of a run that ended well; returns what the launcher tells of it."""
        slowest = self.tally.slowest()
        if self.record is not None:
            self.record.note(stragglers=slowest)
            self.record.close("done" if self.step_done >= self.settings.steps else "stopped", self.step_done)
        return {
            "run": self.job.run,
            "folder": str(self.job.folder),
            "step": self.step_done,
            "resumedFrom": self.start_step if self.found else None,
            "transport": self.network.line,
            "slowest": stragglers.line(slowest),
            **self.latest,
        }

    def keep(self, write: Callable[[RunRecord], None]) -> None:
        """Writes to the record; where it can't be written any more, all ranks stop."""

        def work() -> None:
            if self.record is not None:
                with self.hang.pause("writing the record"):
                    write(self.record)

        self.world.together(work)


def _silent(_text: str) -> None:
    pass


@contextlib.contextmanager
def _settled() -> Iterator[None]:
    """For the block Python's garbage collector leaves alone what was there before it. To go through all that was ever imported costs a step that the
    host binds 7% on average, and comes on each rank at another time, for which the others wait."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _open_record(job: Checked, world: World, start_step: int, chosen: layout.Layout, pieces: Pieces, say: Callable[[str], None]) -> RunRecord:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if world.device.type == "cuda" else None  # type: ignore[no-untyped-call]
    s = job.settings
    storage = place(s.storage, hasty=True)  # training waits while it is written
    record = open_run(storage, job.run, job.identity, schema.as_mapping(s), nccl=nccl, patience=s.storage_patience, say=say)
    record.start(start_step, world.size, world.hosts)
    decided = {**dataclasses.asdict(chosen.choice), "blocks_together": chosen.together, "replayed": chosen.replayed}
    record.note(plan=decided, pieces=dataclasses.asdict(pieces))
    return record


def _mfu(line: StepMetrics, job: Checked, world: World) -> float | None:
    if world.device.type != "cuda":
        return None
    peak = plan.this_machine("cuda").peak_tflops * 1e12
    return mfu(line.tokens_per_second_per_gpu, layout.shape(job), job.sequence_length, peak)


def _opening(job: Checked, world: World, choice: plan.Choice, net: Any) -> str:
    parameters = sum(p.numel() for p in net.parameters())
    hosts = f"{len(world.hosts)} host" + ("s" if len(world.hosts) > 1 else "")
    return (
        f"run {job.run}: {job.config.model_type}, {parameters / 1e6:,.1f} M parameters, {world.size} x {world.device.type} on {hosts}; "
        f"{choice.parallel}, {'resharding' if choice.reshard else 'no resharding'}, recompute {choice.activation_checkpointing}, "
        f"{job.settings.tokens_per_step // job.sequence_length} rows of {job.sequence_length} a step in micro-batches of {choice.micro_batch}"
    )


def _progress(line: StepMetrics, last_step: int, seconds_left: float) -> str:
    left = str(datetime.timedelta(seconds=round(seconds_left)))
    share = f", {line.mfu:.1%} MFU" if line.mfu is not None else ""
    return f"step {line.step:>{len(str(last_step))}}/{last_step}  loss {line.loss:.4f}  {line.tokens_per_second:>9,.0f} tokens/s{share}  {left} left"
