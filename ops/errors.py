"""What a person is told when a command can't do its work: one sentence, and the exit code that goes with it.

2, 3, 4 and 130 mean what they mean for ``python -m training.job``.
"""

from __future__ import annotations

from config import BadInput as BadInput

EXIT_DONE = 0
EXIT_BAD_INPUT = 2
EXIT_TRAINING_FAILED = 3
EXIT_TRANSPORT_NOT_PROVEN = 4
EXIT_REFUSED = 5
EXIT_LEFT = 6
EXIT_BUSY = 7
EXIT_INTERRUPTED = 130

MEANINGS = {
    EXIT_DONE: "done",
    EXIT_BAD_INPUT: "bad input: a setting, a stack or a run that can't be used as it is",
    EXIT_TRAINING_FAILED: "the training job failed or was stopped",
    EXIT_TRANSPORT_NOT_PROVEN: "the network that carried the run is not the one asked for, or unproven",
    EXIT_REFUSED: "AWS, Kubernetes, Ray or the engine refused or could not be reached",
    EXIT_LEFT: "something needs your attention: a finding, or a thing that still bills",
    EXIT_BUSY: "another operation works on this stack",
    EXIT_INTERRUPTED: "interrupted",
}


class OpsError(Exception):
    """A failure whose message is written for a person: what, where, the value, the way out. Printed without a traceback."""

    exit_code: int = EXIT_REFUSED


class Refused(OpsError):
    """AWS, Kubernetes, Ray or the engine said no, or did not answer."""


class TrainingFailed(OpsError):
    """The training job ended without success."""

    exit_code = EXIT_TRAINING_FAILED


class TransportNotProven(OpsError):
    """The gate refused the run's network."""

    exit_code = EXIT_TRANSPORT_NOT_PROVEN


class Attention(OpsError):
    """The command worked, and found what needs a person: a finding of doctor, something that still bills."""

    exit_code = EXIT_LEFT


class Busy(OpsError):
    """Another operation works on the same stack."""

    exit_code = EXIT_BUSY


class Interrupted(OpsError):
    """Ctrl-C; the message says what stands now, and how to go on."""

    exit_code = EXIT_INTERRUPTED


def help_text(*codes: int) -> str:
    """The exit codes of a command, for its --help: those given, besides done, bad input, refused and interrupted."""
    shown = sorted({EXIT_DONE, EXIT_BAD_INPUT, EXIT_REFUSED, EXIT_INTERRUPTED, *codes})
    return "Exit codes: " + "; ".join(f"{code} {MEANINGS[code]}" for code in shown) + "."
