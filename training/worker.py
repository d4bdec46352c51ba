"""What each process of a run does around the loop: data, model, record, resume, evaluation, export."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from training import checkpoint, divergence, loop, model, parallel, plan, room, schema, stragglers, tokenizer, watchdog
from training.data import Batches, PreparedData, eval_batches, open_data
from training.divergence import Diverged
from training.errors import BadInput, JobError, Terminated, TrainingFailed, TransportNotProven
from training.export import export
from training.fast.attention import preferred_kernels
from training.fast.choose import Pieces
from training.fast.choose import choose as choose_pieces
from training.flops import ModelShape, mfu
from training.notice import Notice, Watch
from training.record import RunRecord, StepMetrics, fail_for, now, open_run, refuse_another
from training.settings import Settings, identity, not_divisible, run_name
from training.storage import Place, patiently, place, redacted
from training.transport import gate
from training.transport.verdict import Expectation, ExpectedBytes, Verdict
from training.world import World

# A run that checkpoints seldom is judged in between, so that a network lost on the way is found within minutes.
JUDGE_EVERY_SECONDS = 600.0
VERDICT_FILE = "verdict.json"


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


@dataclasses.dataclass(frozen=True)
class Checked:
    """Settings whose data, model and run folder were looked at and found to fit together."""

    settings: Settings
    data: PreparedData
    config: PretrainedConfig
    run: str
    folder: Place
    identity: Mapping[str, Any]
    resumes: bool = False
    """Whether the folder holds this run already."""

    @property
    def last_step(self) -> int:
        """The step at which this start ends: ``steps``, or ``stop_after`` where that is earlier."""
        return min(self.settings.steps, self.settings.stop_after or self.settings.steps)

    @property
    def sequence_length(self) -> int:
        """Tokens in a row."""
        return self.data.manifest.sequence_length


def check(settings: Settings) -> Checked:
    """Opens data, model configuration and run folder, before any worker or GPU is asked for. Raises BadInput."""
    data = open_data(settings.data)
    length = data.manifest.sequence_length
    if settings.sequence_length not in (None, length):
        raise BadInput(f"sequenceLength = {settings.sequence_length}, but the data was prepared in rows of {length}; leave it out, or prepare the data anew")
    if settings.tokens_per_step % length:
        raise BadInput(not_divisible(settings.tokens_per_step, length))
    if data.rows("train") == 0:
        raise BadInput(f"data = {settings.data}: no whole training row in it; prepare it with more text or a shorter sequenceLength")
    config = model.load_config(settings.model, data.manifest.vocab_size)
    model.check_config(config, vocab_size=data.manifest.vocab_size, sequence_length=length)
    storage = place(settings.storage)
    run = run_name(settings, data.manifest.hash)
    deciding = identity(settings, data.manifest.hash)
    try:
        before = refuse_another(storage / run, deciding)
    except OSError as error:
        raise BadInput(f"storage = {settings.storage}: can't be read ({error}); give a folder or bucket that you may write to") from error
    return Checked(settings, data, config, run, storage / run, deciding, resumes=before is not None)


def _check_again(settings: Settings, say: Callable[[str], None]) -> Checked:
    """As :func:`check`, which has passed before any worker was started: what can't be read now is asked for again, for ``storage_patience`` seconds."""
    refusal: BadInput | None = None

    def attempt() -> Checked:
        nonlocal refusal
        try:
            return check(settings)
        except BadInput as error:
            refusal = error
            if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, (PermissionError, NotADirectoryError)):
                raise error.__cause__ from None
            raise

    try:
        return patiently(attempt, settings.storage_patience, say, "data and storage")
    except OSError:
        assert refusal is not None
        raise refusal from None


def check_tokenizer(job: Checked) -> None:
    """Refuses data that was tokenised for another model than the pretrained one; a model without a tokenizer is not held against it. Raises BadInput."""
    if job.settings.model.pretrained is None:
        return
    with model.pretrained_source(job.settings.model.pretrained, weights=False) as source:
        try:
            own = tokenizer.load(source)
        except BadInput:
            return
    if tokenizer.fingerprint(own) != job.data.manifest.tokenizer_hash:
        raise BadInput(
            f"data = {redacted(job.settings.data)} was not tokenised with the tokenizer of model.pretrained = {redacted(job.settings.model.pretrained)};"
            " prepare it again with that one"
        )


def run_rank(settings: Settings, world: World, hooks: Hooks) -> dict[str, Any]:
    """One rank's whole run. Returns a summary of plain data: run, folder, step, loss, evalLoss, perplexity, tokensPerSecond, resumedFrom.

    A collective: every rank calls it with the same settings. Raises JobError on all ranks alike, or anything else on one.
    """
    say = hooks.say if world.is_main else _silent
    job = world.together(lambda: _check_again(settings, say))
    pieces = world.together(lambda: choose_pieces(job.config, world.device, settings.blocks, settings.precision, job.sequence_length, settings.document_mask))
    choice = world.broadcast(world.on_main(lambda: _choose(job, world, pieces, say)))
    assert choice is not None
    _share_storage(job, world, say)

    net = model.build_empty(job.config)
    products = parallel.prepare_blocks(net, choice.activation_checkpointing, pieces)
    mesh = world.together(lambda: parallel.make_mesh(world, choice.parallel))
    parallel.shard(
        net,
        mesh,
        reshard=choice.reshard,
        compute_dtype=_compute_dtype(settings, world),
        reduce_dtype=torch.bfloat16 if choice.reduce_dtype == "bf16" else torch.float32,
    )
    model.allocate(net, world.device)
    optimizer = loop.make_optimizer(net, settings)

    found = checkpoint.latest(job.folder / "checkpoints", world, say, settings.storage_patience)
    start_step = found.step if found else 0
    record = world.on_main(lambda: _open_record(job, world, start_step, choice, pieces, say))

    def keep(write: Callable[[RunRecord], None]) -> None:
        # A collective: where the record can't be written any more, all ranks stop.
        def work() -> None:
            if record is not None:
                with hang.pause("writing the record"):
                    write(record)

        world.together(work)

    attempt = world.broadcast(record.attempt if record else 0)
    network = Network(job, world, choice, attempt, say, record)
    background = world.device.type == "cuda"
    checkpoints = checkpoint.Checkpointer(
        job.folder / "checkpoints", world, attempt, settings.keep_checkpoints, asynchronous=background, patience=settings.storage_patience, say=say
    )
    step_done = start_step
    watch = Watch(world, hooks.notice, start_step)
    expected: Notice | None = None
    skips = world.broadcast(world.on_main(lambda: divergence.read_skips(job.folder))) or []
    tally = stragglers.Tally(world.gather(socket.gethostname()))
    hang = loop.NOBODY
    guards = contextlib.ExitStack()
    guards.callback(job.data.close)
    if record is not None:
        closing = record.close
        guards.enter_context(hooks.guard(lambda reason: closing("failed", step_done, reason)))

    def on_hang(text: str, done: int) -> None:
        hooks.say(text)
        if record is None:  # rank 0 is the one that is late
            print(text, file=sys.stderr, flush=True)  # noqa: T201 (a launcher without Ray shows what rank 0 says, and no other)
            fail_for(job.folder, attempt, done, text)
            return
        record.note(stragglers=tally.slowest())
        record.close("failed", done, text)

    def fill() -> None:
        weights = world.on_main(lambda: model.full_weights(settings.model, job.config, settings.seed))
        model.fill(net, weights, world)

    try:
        network.check()
        loaded = checkpoints.load_newest(found, net, optimizer)
        if loaded is not found:
            found, start_step = loaded, loaded.step if loaded else 0
            step_done = start_step
            keep(lambda of_run: of_run.rewind(start_step))
        if found:
            say(f"resuming {job.run} from step {found.step} (written by {found.facts['worldSize']} workers, now {world.size})")
        else:
            fill()
        model.check_master_weights(net)
        rows = settings.tokens_per_step // job.sequence_length
        if world.device.type == "cuda":
            with preferred_kernels():
                room.check(net, optimizer, settings, world, job.folder, size=choice.micro_batch, length=job.sequence_length, rows=rows, reshard=choice.reshard)
            for block in products:
                block.forget()
        say(_opening(job, world, choice, net))
        say(str(pieces))

        eval_rows = min(settings.eval_rows, job.data.rows("eval"))
        latest: dict[str, float] = {}
        began, first = time.monotonic(), start_step

        def on_line(line: StepMetrics) -> None:
            nonlocal step_done
            step_done = line.step
            line = dataclasses.replace(line, mfu=_mfu(line, job, world))
            latest.update(loss=line.loss, tokensPerSecond=line.tokens_per_second)
            keep(lambda of_run: of_run.log(line))
            if record is None:
                return
            hooks.on_metrics(
                {"step": line.step, "loss": line.loss, "grad_norm": line.grad_norm, "tokens_per_second": line.tokens_per_second, "data_wait": line.data_wait}
            )
            left = (time.monotonic() - began) / (line.step - first) * (job.last_step - line.step)
            say(_progress(line, job.last_step, left))

        def evaluate(done: int) -> None:
            loss = loop.evaluate(net, eval_batches(job.data, eval_rows, choice.micro_batch, world.size, world.rank, settings.document_mask), settings, world)
            latest.update(evalLoss=loss, perplexity=math.exp(min(loss, 700.0)))
            keep(lambda of_run: of_run.log_evaluation(done, loss))
            say(f"step {done}: held-out loss {loss:.4f}, perplexity {latest['perplexity']:.2f}")

        def save(done: int) -> None:
            if not divergence.all_finite(net, optimizer):
                raise Diverged(done, "weights or their moments are not finite, though the loss is,")
            facts = {"run": job.run, "tokens": done * settings.tokens_per_step, "loss": latest.get("loss"), "identity": job.identity}
            checkpoints.save(done, net, optimizer, facts)

        def heed(done: int, is_saved: bool) -> None:
            nonlocal expected, step_done
            told = watch.look(done)
            if told is None:
                return
            step_done = done
            hang.pausing("a last checkpoint")
            began, expected = time.monotonic(), told
            facts = {"deadline": None if told.deadline is None else f"{datetime.datetime.fromtimestamp(told.deadline, datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"}
            keep(lambda of_run: of_run.expect(told.outcome, told.reason, step=done, **facts))
            if not is_saved:
                save(done)
            checkpoints.finish(net, optimizer)  # storage that refuses it is asked again: there is nothing better to do with the time that is left
            seconds = world.broadcast(time.monotonic() - began)
            keep(lambda of_run: of_run.expect(told.outcome, told.reason, step=done, save_seconds=round(seconds, 2), **facts))
            say(f"{told.reason}; step {done} is saved, in {seconds:.1f} s")
            watch.saved(seconds)
            hooks.saved(told)

        def after_step(done: int) -> None:
            evaluates = eval_rows > 0 and (done == job.last_step or (settings.eval_every > 0 and done % settings.eval_every == 0))
            regular = done % settings.checkpoint_every == 0
            # One that is owed waits for a step whose loss is known to be finite, as a regular one's always is.
            saves = done == job.last_step or ((regular or done % settings.log_every == 0) and checkpoints.is_due(regular))
            if evaluates or saves:
                hang.pausing("an evaluation or a checkpoint")
            # After the first step, so that a run on the wrong network costs one step; then the bytes, whenever something
            # else than training is about to use the network.
            if done == start_step + 1 or evaluates or saves or (done % settings.log_every == 0 and network.is_due()):
                network.judge(done)
            if evaluates:
                evaluate(done)
            if saves:
                save(done)
                hooks.on_checkpoint(done, latest)
            if done < job.last_step:
                heed(done, saves)
            if evaluates or saves:
                network.mark(done)
            hang.pausing(None)
            checkpoints.poll()

        def train(after: int) -> None:
            reader = Batches(
                job.data,
                "train",
                rows,
                choice.micro_batch,
                world.size,
                world.rank,
                settings.seed,
                after,
                settings.document_mask,
                skipped=divergence.ranges(skips),
                pin=world.device.type == "cuda",
            )
            with reader as batches, preferred_kernels():
                loop.train(
                    net,
                    optimizer,
                    batches,
                    settings,
                    world,
                    last_step=job.last_step,
                    reshard=choice.reshard,
                    on_line=on_line,
                    after_step=after_step,
                    on_shares=tally.add,
                    watch=hang,
                    spikes=spikes,
                )

        def go_back(bad: Diverged) -> int:
            """Loads the last checkpoint, or the weights of the beginning, and leaves out the data since then; returns its step."""
            nonlocal began, first, step_done
            checkpoints.wait()
            checkpoints.owed = False  # the one of the bad step is not to be made up for
            newest = checkpoint.latest(job.folder / "checkpoints", world, say, settings.storage_patience)
            good = checkpoints.load_newest(newest, net, optimizer)
            if good is None:
                optimizer.state.clear()
                fill()
            step = good.step if good else 0
            left_out = divergence.bad_range(step, bad.step, divergence.ranges(skips))
            entry = {"from": left_out[0], "to": left_out[1], "step": bad.step, "backTo": step, "why": bad.why, "attempt": attempt, "time": now()}
            skips.append(world.broadcast(entry))
            world.on_main(lambda: divergence.write_skips(job.folder, skips))
            keep(lambda of_run: of_run.rewind(step, entry))
            network.mark(step)
            began, first, step_done = time.monotonic(), step, step
            say(f"{bad.why} at step {bad.step}: back to step {step}, and on with other rows ({left_out[1] - left_out[0]} steps of data are left out)")
            return step

        if start_step < job.last_step:
            spikes, at = divergence.Spikes(settings.spike_factor), start_step
            with _watchdog(job, world, attempt, start_step, on_hang) as hang:
                for rollbacks in range(settings.max_rollbacks + 1):
                    try:
                        train(at)
                        break
                    except Diverged as bad:
                        if settings.on_divergence == "stop":
                            raise
                        if rollbacks == settings.max_rollbacks:
                            raise bad.after(rollbacks) from bad
                        hang.pausing("going back to a checkpoint")
                        at = go_back(bad)
                        hang.pausing(None)
        else:
            say(f"step {start_step} is already done; nothing is left to train")
            if eval_rows:
                evaluate(start_step)
        checkpoints.finish(net, optimizer)
        step_done = max(start_step, job.last_step)
        if settings.export:
            generation = world.on_main(lambda: model.load_generation_config(settings.model))
            export(
                net,
                job.data.tokenizer_folder,
                job.folder / "model",
                world,
                eos_token_id=job.data.manifest.eos_token_id,
                generation=generation,
                patience=settings.storage_patience,
                say=say,
            )
    except Exception as raised:
        error = network.explain(raised)
        if isinstance(raised, JobError):  # on all ranks alike: the last good checkpoint may still be on its way
            with contextlib.suppress(TrainingFailed):
                checkpoints.wait()
        if record is not None:
            reason = f"{error}" if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
            blamed = None if isinstance(error, JobError) else hooks.blame()
            with contextlib.suppress(TrainingFailed):  # the storage may be what failed; the error itself must be the one that is told
                record.note(stragglers=tally.slowest())
                if expected is not None and (not isinstance(error, JobError) or isinstance(error, Terminated)):
                    record.close(expected.outcome, step_done, expected.reason)
                record.close("failed", step_done, f"{blamed}. {reason}" if blamed else reason)
        raise error from raised if error is not raised else None
    finally:
        guards.close()
    if record is not None:
        record.note(stragglers=tally.slowest())
        record.close("done" if step_done >= settings.steps else "stopped", step_done)
    return {
        "run": job.run,
        "folder": str(job.folder),
        "step": step_done,
        "resumedFrom": start_step if found else None,
        "transport": network.line,
        "slowest": stragglers.line(tally.slowest()),
        **latest,
    }


class Network:
    """Proves, while the run goes on, which network carries it. Its methods are collectives, but for :meth:`explain`."""

    def __init__(self, job: Checked, world: World, choice: plan.Choice, attempt: int, say: Callable[[str], None], record: RunRecord | None) -> None:
        settings = job.settings
        self.world, self.say, self.record = world, say, record
        transport = settings.transport
        if settings.min_workers is not None and len(world.hosts) == 1 and transport != "any":
            transport = "any"
            say(f"all workers are on one host, so nothing travels between hosts; transport = {settings.transport} is judged when there are two")
        self.expected = Expectation(transport, len(world.hosts), world.size, settings.nics_per_host, settings.gpu_direct)
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        # This host's own folder: NCCL writes there all the time. Left in place, for whoever wants to read NCCL's own words.
        logs = Path(tempfile.gettempdir()) / f"nccl-logs-{os.getuid()}"
        self.started = gate.start(self.expected, logs, job.run, attempt, world.rank, world.local_rank, backend)
        cluster = _cluster(world, plan.machine("cpu", compute_bytes=_compute_dtype(settings, world).itemsize))
        # Expected bytes are those of NCCL's rings; gloo moves the same data by other ways.
        self.bytes_per_step = (
            plan.between_hosts_bytes(_shape(job), cluster, choice, settings.tokens_per_step, job.sequence_length)
            if backend == "nccl" and len(world.hosts) > 1
            else None
        )
        self.line: str | None = None
        self.marked_at: int | None = None
        self.judged_at = time.monotonic()

    def check(self) -> None:
        """What each host must have before NCCL starts. Raises TransportNotProven on all ranks."""
        checks = self.world.gather(self.started.checks)
        missing = [f"{p.host}: {check.saw}; {check.do}" for p in checks if p is not None for check in p.checks if not check.ok]
        if missing:
            found = gate.judge_now(self.started, self.expected, self.world.gather)
            self._keep(found)
            more = f" ({len(missing) - 1} more in verdict.json)" if len(missing) > 1 else ""
            raise TransportNotProven(f"transport = efa, but {missing[0]}{more}")

    def is_due(self) -> bool:
        """Whether the last verdict is older than JUDGE_EVERY_SECONDS, by rank 0's clock."""
        return self.world.broadcast(time.monotonic() - self.judged_at > JUDGE_EVERY_SECONDS)

    def judge(self, done: int) -> None:
        """Judges all ranks, writes verdict.json, and raises TransportNotProven on all of them unless the verdict lets the run go on."""
        expected_bytes = None
        if self.bytes_per_step is not None and self.marked_at is not None and done > self.marked_at:
            expected_bytes = ExpectedBytes(self.bytes_per_step * (done - self.marked_at))
        self._settle()
        found = gate.judge_now(self.started, self.expected, self.world.gather, expected_bytes)
        self._keep(found)
        if self.line != found.line():
            self.line = found.line()
            self.say(self.line)
        gate.stop_unless_proven(found)
        self.judged_at = time.monotonic()
        self.mark(done)

    def mark(self, done: int) -> None:
        """Starts the count of bytes anew after step ``done``."""
        self._settle()
        self.started, self.marked_at = gate.mark(self.started), done

    def _keep(self, found: Verdict) -> None:
        record = self.record
        self.world.together((lambda: record.write(VERDICT_FILE, found.as_dict())) if record is not None else (lambda: None))

    def _settle(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()  # the steps that were counted must have left the host

    def explain(self, error: Exception) -> Exception:
        """``error``, or what it means where NCCL, told to use EFA and nothing else, could not start."""
        if self.line is not None or self.expected.transport != "efa" or isinstance(error, JobError):
            return error
        found = gate.judge_reports([gate.report(self.started)], self.expected, self.started.run, self.started.attempt)
        if found.ok:
            return error
        if self.record is not None:
            with contextlib.suppress(TrainingFailed):
                self.record.write(VERDICT_FILE, found.as_dict())
        return TransportNotProven(f"{gate.failure(found)}. It stopped with: {error}")


def _silent(_text: str) -> None:
    pass


def _watchdog(job: Checked, world: World, attempt: int, done: int, on_hang: Callable[[str, int], None]) -> watchdog.Idle:
    s = job.settings
    return watchdog.Watchdog(world, job.folder, attempt, done, s.hang_factor, s.hang_floor, on_hang) if s.hang_factor > 0 else watchdog.Idle()


def _compute_dtype(settings: Settings, world: World) -> torch.dtype:
    bf16 = settings.precision in ("bf16", "fp8") or (settings.precision == "auto" and world.device.type == "cuda")
    return torch.bfloat16 if bf16 else torch.float32


def _shape(job: Checked) -> ModelShape:
    return ModelShape.of(job.config.to_dict())


def _cluster(world: World, machine: plan.Machine) -> plan.Cluster:
    """``world`` as the plan knows it; where hosts hold unequal numbers of workers, each counts as alone on its host, which no layout is built on."""
    return plan.Cluster(len(world.hosts), world.local_size, machine) if world.even else plan.Cluster(world.size, 1, machine)


def _choose(job: Checked, world: World, pieces: Pieces, say: Callable[[str], None]) -> plan.Choice:
    s = job.settings

    def fixed(value: str) -> str | None:
        return None if value == "auto" else value

    blocks = "fp8" if pieces.fp8 else "fast" if pieces.blocks == "fast" else "compiled"
    machine = plan.this_machine(world.device.type, compute_bytes=_compute_dtype(s, world).itemsize, blocks=blocks)
    cluster = _cluster(world, machine)
    layout = fixed(s.parallel)
    if layout == "hsdp" and s.min_workers is not None and not world.even:
        layout = "fsdp"
        say(f"parallel = hsdp needs as many workers on each host, and {world.size} workers on {len(world.hosts)} hosts are not: fsdp until they are")
    wanted = plan.Fixed(
        parallel=layout,
        reshard=None if s.reshard == "auto" else s.reshard == "yes",
        reduce_dtype=fixed(s.reduce_dtype),
        activation_checkpointing=fixed(s.activation_checkpointing),
        micro_batch=s.micro_batch,
        micro_batch_below=room.too_large(job.folder),
    )
    choice, _ = plan.choose(_shape(job), cluster, s.tokens_per_step, job.sequence_length, wanted, s.loss_chunk)
    if s.min_workers is not None and s.min_workers < world.size:
        # Refused now, and not hours later when a host is lost.
        a_host = min(s.min_workers, world.local_size)
        even = s.min_workers % a_host == 0
        fewest = plan.Cluster(s.min_workers // a_host, a_host, machine) if even else plan.Cluster(s.min_workers, 1, machine)
        try:
            small = wanted if even else dataclasses.replace(wanted, parallel="fsdp")
            plan.choose(_shape(job), fewest, s.tokens_per_step, job.sequence_length, small, s.loss_chunk)
        except BadInput as error:
            raise BadInput(f"minWorkers = {s.min_workers} is too few: {error}. Raise minWorkers") from error
    return choice


def _share_storage(job: Checked, world: World, say: Callable[[str], None]) -> None:
    """Proves before the first step that all hosts see the same storage. Raises BadInput on all ranks where they don't."""
    probe = job.folder / f".probe-{world.broadcast(time.time_ns())}"
    # A run that has written there before may do so; a new one's mistake is told at once.
    patience = job.settings.storage_patience if job.resumes else 0.0

    def write() -> None:
        try:
            patiently(lambda: probe.write_bytes(b"shared"), patience, say, f"storage = {redacted(job.settings.storage)}")
        except OSError as error:
            raise BadInput(f"storage = {job.settings.storage}: can't be written to ({error}); give a folder or bucket that you may write to") from error

    def read() -> None:
        if not probe.exists():
            raise BadInput(f"storage = {job.settings.storage} is not the same folder on all hosts; use an s3:// URI or a shared file system")

    try:
        world.on_main(write)
        world.together(read)
    finally:
        if world.is_main:
            with contextlib.suppress(OSError):
                probe.delete()


def _open_record(job: Checked, world: World, start_step: int, choice: plan.Choice, pieces: Pieces, say: Callable[[str], None]) -> RunRecord:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if world.device.type == "cuda" else None  # type: ignore[no-untyped-call]
    s = job.settings
    storage = place(s.storage, hasty=True)  # training waits while it is written
    record = open_run(storage, job.run, job.identity, schema.as_mapping(s), nccl=nccl, patience=s.storage_patience, say=say)
    record.start(start_step, world.size, world.hosts)
    record.note(plan=dataclasses.asdict(choice), pieces=dataclasses.asdict(pieces))
    return record


def _mfu(line: StepMetrics, job: Checked, world: World) -> float | None:
    if world.device.type != "cuda":
        return None
    peak = plan.this_machine("cuda").peak_tflops * 1e12
    return mfu(line.tokens_per_second_per_gpu, _shape(job), job.sequence_length, peak)


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
