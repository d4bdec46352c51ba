"""The gate while a run goes on: the network is judged after the first step, and whenever something else than training uses it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from training import layout, plan
from training.checks import Checked
from training.errors import JobError, TrainingFailed, TransportNotProven
from training.record import RunRecord
from training.transport import gate
from training.transport.verdict import Expectation, ExpectedBytes, Verdict
from training.world import World

# A run that checkpoints seldom is judged in between, so that a network lost on the way is found within minutes.
JUDGE_EVERY_SECONDS = 600.0
VERDICT_FILE = "verdict.json"


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
        cluster = layout.cluster(world, plan.machine("cpu", compute_bytes=layout.compute_dtype(settings, world).itemsize))
        # Expected bytes are those of NCCL's rings; gloo moves the same data by other ways.
        self.bytes_per_step = (
            plan.between_hosts_bytes(layout.shape(job), cluster, choice, settings.tokens_per_step, job.sequence_length)
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
