"""The gate in a running job, on every rank alike: :func:`start` before NCCL is used, :func:`judge_now` and :func:`stop_unless_proven` after a step."""

from __future__ import annotations

import dataclasses
import datetime
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.errors import TransportNotProven
from training.transport import counters as sysfs
from training.transport import evidence, preflight
from training.transport.verdict import Expectation, ExpectedBytes, Verdict, judge


@dataclasses.dataclass(frozen=True)
class Started:
    """What a rank keeps from its start to its verdicts. ``before`` and ``checks`` are taken by the first rank of each host alone."""

    run: str
    attempt: int
    rank: int
    backend: str
    host: str
    pid: int
    log_file: str
    before: sysfs.Reading | None
    checks: preflight.Preflight | None


def start(expectation: Expectation, log_folder: str | Path, run: str, attempt: int, rank: int, local_rank: int, backend: str, *, sys: str = "/sys") -> Started:
    """Prepares this process for the gate: its environment, where NCCL writes, the counters as they stand and, where EFA is demanded, the checks of the host.

    To be called before NCCL is first used. ``log_folder`` is this host's own (made here, private to the user); ``attempt`` counts the starts of the run.
    ``backend`` is the process group's: nccl or gloo. An interface that the environment already names for NCCL is left.
    """
    folder = Path(log_folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    host = socket.gethostname().split(".")[0]
    if backend == "nccl":
        named = os.environ.get("NCCL_SOCKET_IFNAME")
        os.environ.update(preflight.environment(expectation.transport, folder, run, attempt, rank))
        if named:
            os.environ["NCCL_SOCKET_IFNAME"] = named
    first = local_rank == 0
    return Started(
        run=run,
        attempt=attempt,
        rank=rank,
        backend=backend,
        host=host,
        pid=os.getpid(),
        log_file=str(preflight.log_file(folder, run, attempt, rank)),
        before=sysfs.read(sys) if first else None,
        checks=preflight.check_worker(host, expectation.nics_per_host or 1) if first and backend == "nccl" and expectation.transport == "efa" else None,
    )


def mark(started: Started, *, sys: str = "/sys") -> Started:
    """Starts the count of bytes anew, so that it holds whole steps and nothing of the start (weights sent round, checkpoints read)."""
    return dataclasses.replace(started, before=sysfs.read(sys)) if started.before is not None else started


def report(started: Started, *, sys: str = "/sys") -> dict[str, Any]:
    """What this rank knows now, as plain JSON data for :func:`judge_reports`."""
    if started.backend == "nccl":
        own = evidence.collect_rank(started.log_file, started.host, started.pid, started.rank)
    else:
        own = evidence.gloo_rank(started.host, started.pid, started.rank)
    return {
        "evidence": own.as_dict(),
        "moved": sysfs.moved(started.before, sysfs.read(sys)).as_dict() if started.before is not None else None,
        "preflight": started.checks.as_dict() if started.checks is not None else None,
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def judge_reports(
    reports: Sequence[Mapping[str, Any]], expectation: Expectation, run: str, attempt: int, expected_bytes: ExpectedBytes | None = None
) -> Verdict:
    """The verdict on the reports of all ranks; the same on every rank that has them, in rank order."""
    ranks = [evidence.from_dict(r["evidence"]) for r in reports]
    moved = {rank.host: sysfs.moved_from_dict(r["moved"]) for rank, r in zip(ranks, reports, strict=True) if r["moved"] is not None}
    return judge(
        ranks,
        expectation,
        counters=moved or None,
        expected_bytes=expected_bytes,
        preflight=[preflight.from_dict(r["preflight"]) for r in reports if r["preflight"] is not None],
        run=run,
        attempt=attempt,
        judged_at=reports[0]["at"] if reports else "",
    )


def judge_now(
    started: Started, expectation: Expectation, gather: Callable[[Any], list[Any]], expected_bytes: ExpectedBytes | None = None, *, sys: str = "/sys"
) -> Verdict:
    """Judges the run on every rank at once; every rank gets the same verdict, so that all go on or all stop.

    ``gather`` gives every rank's value to every rank, in rank order (``torch.distributed.all_gather_object``).
    """
    return judge_reports(gather(report(started, sys=sys)), expectation, started.run, started.attempt, expected_bytes)


def stop_unless_proven(found: Verdict) -> None:
    """Raises TransportNotProven (exit code 4) for fail and unproven. Write verdict.json before: it is what tells why."""
    if not found.ok:
        raise TransportNotProven(failure(found))


def failure(found: Verdict) -> str:
    """One sentence for a person: the verdict, the first reason and what to do about it."""
    first = found.reasons[0]
    more = f" ({len(found.reasons) - 1} more in verdict.json)" if len(found.reasons) > 1 else ""
    return f"{found.line()}; {first.where}: {first.saw}; {first.do}{more}"
