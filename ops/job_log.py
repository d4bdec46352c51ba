"""What a job's log tells of its progress: the lines that training/worker.py says, as data. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

RUN = re.compile(r"^run (\S+): ", re.MULTILINE)
STEP = re.compile(r"^step +(\d+)/(\d+) +loss (\S+) +([\d,]+) tokens/s(?:, ([\d.]+)% MFU)? +((?:\d+ days?, )?[\d:]+) left", re.MULTILINE)
TRANSPORT = re.compile(r"^(?:error: )?transport (pass|fail|unproven|not-required): expected (\w+), observed ([\w-]+)", re.MULTILINE)
RESUMED = re.compile(r"^resuming \S+ from step (\d+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Progress:
    """None: not said yet. loss: nats a token. left: as the job said it (h:mm:ss). verdict: "pass: efa", what the gate last said."""

    run: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    left: str | None = None
    verdict: str | None = None
    observed: str | None = None
    expected: str | None = None
    last_line: str = ""


def read(log: str) -> Progress:
    """The newest of each."""
    steps = list(STEP.finditer(log))
    step = steps[-1] if steps else None
    transports = list(TRANSPORT.finditer(log))
    verdict = transports[-1] if transports else None
    runs = RUN.findall(log)
    lines = [line for line in log.splitlines() if line.strip()]
    return Progress(
        run=runs[-1] if runs else None,
        step=int(step[1]) if step else None,
        steps=int(step[2]) if step else None,
        loss=_number(step[3]) if step else None,
        tokens_per_second=_number(step[4].replace(",", "")) if step else None,
        mfu=float(step[5]) / 100 if step and step[5] else None,
        left=step[6] if step else None,
        verdict=verdict[1] if verdict else None,
        expected=verdict[2] if verdict else None,
        observed=verdict[3] if verdict else None,
        last_line=lines[-1].strip()[:300] if lines else "",
    )


def speeds(log: str) -> list[tuple[int, float]]:
    """(step, tokens a second) of every progress line."""
    return [(int(match[1]), float(match[4].replace(",", ""))) for match in STEP.finditer(log)]


def errors(log: str) -> Sequence[str]:
    """The lines in which the job says why it stopped."""
    return [line.removeprefix("error: ") for line in log.splitlines() if line.startswith("error: ")]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
