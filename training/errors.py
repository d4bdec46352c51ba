"""What a person is told when a run can't go on: one sentence, and the exit code that goes with it.

Exit codes: 0 done, 2 bad input, 3 training failed, 4 transport not proven, 143 ended by SIGTERM after a checkpoint.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_BAD_INPUT = 2
EXIT_TRAINING_FAILED = 3
EXIT_TRANSPORT_NOT_PROVEN = 4
EXIT_TERMINATED = 143  # what a shell says of a process that SIGTERM ended


class JobError(Exception):
    """A failure whose message is written for a person: what, where, the value, the way out. Printed without a traceback."""

    exit_code: int = EXIT_TRAINING_FAILED


class BadInput(JobError):
    """Settings, data, model or run folder that can't be used as they are; trying again without a change is pointless."""

    exit_code = EXIT_BAD_INPUT


class TrainingFailed(JobError):
    """Training stopped half-way (disk full, a worker lost too often, non-finite loss); earlier checkpoints are untouched."""

    exit_code = EXIT_TRAINING_FAILED


class StartAgain(RuntimeError):
    """What was tried at a start's beginning failed, and was noted: the next start of the run does without it."""


class OneRankFailed(TrainingFailed):
    """What one rank of several met and the others know nothing of: they end because its process does, and not with it."""


class TransportNotProven(JobError):
    """The run's network is not the one that was asked for, or can't be proved to be."""

    exit_code = EXIT_TRANSPORT_NOT_PROVEN


class Terminated(JobError):
    """Ended on purpose by SIGTERM, with a checkpoint of its last step; the same command goes on from it."""

    exit_code = EXIT_TERMINATED


def first_line(error: Exception) -> str:
    """What an exception of another package says, in one line; its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
