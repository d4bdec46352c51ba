"""``make demo``: the whole job on this machine in a few minutes: data, training, a resume on another number of workers, export, samples."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from training import job, schema
from training.errors import EXIT_DONE, JobError
from training.prepare import prepare
from training.prepare_settings import PrepareSettings
from training.settings import Settings
from training.storage import place

PROMPTS = ("import os\nimport ", "def __init__(self, ", "    if not isinstance(")


@dataclasses.dataclass(frozen=True)
class Size:
    """How much the demo does. The default takes about three minutes on two cores; its test does less of the same."""

    sources: tuple[str, ...] = ("stdlib",)
    vocabulary: int = 1024
    sequence_length: int = 128
    model: str = "small"
    tokens_per_step: int = 2048
    steps: int = 400
    first_steps: int = 300
    workers: tuple[int, int] = (2, 1)


def demo(folder: Path, size: Size = Size(), say: Callable[[str], None] = print) -> Path:
    """Trains on the sources of the running Python's standard library; returns the run's folder. Raises JobError."""
    from training import evaluate  # imports torch

    began = time.monotonic()

    def heading(text: str) -> None:
        say(f"\n[{time.monotonic() - began:3.0f} s] {text}")

    heading("Data: the source code of this Python's standard library, tokenised and packed")
    data = folder / "data"
    prepare(
        schema.parse(
            PrepareSettings,
            {
                "sources": list(size.sources),
                "output": str(data),
                "tokenizer": f"train:{size.vocabulary}",
                "sequenceLength": size.sequence_length,
                "evalFraction": 0.05,
            },
            "demo",
        ),
        say,
    )

    run = f"demo-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    values = {
        "data": str(data),
        "model": {"random": size.model},
        "storage": str(folder / "runs"),
        "run": run,
        "steps": size.steps,
        "tokensPerStep": size.tokens_per_step,
        "learningRate": 5e-3,
        "warmupSteps": min(10, size.first_steps),
        "logEvery": max(1, size.steps // 16),
        "evalEvery": max(1, size.steps // 4),
        "evalRows": 64,
    }
    first, second = size.workers
    heading(f"Training: {first} workers under Ray Train, sharded by FSDP2, {size.first_steps} of {size.steps} steps")
    job.run(schema.parse(Settings, {**values, "workers": first, "stopAfter": size.first_steps, "export": False}, "demo"), "ray", say)

    heading(f"Resuming the same run on {second} worker{'s' if second > 1 else ''}, to its end; export in Hugging Face format")
    summary = job.run(schema.parse(Settings, {**values, "workers": second}, "demo"), "ray", say)

    heading("Loading the export with from_pretrained, beside the model the run began with")
    result = evaluate.evaluate(place(summary["folder"]), prompts=PROMPTS, tokens=40)
    for line in evaluate.lines(result):
        say(line)

    say("")
    for line in job.summary_lines(summary):
        say(line)
    say(f"  model    {summary['folder']}/model")
    say(f"  took     {time.monotonic() - began:.0f} s")
    return Path(summary["folder"])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.demo", description="Trains a small model on this machine, start to end.")
    parser.add_argument("--folder", default="demo", help="where data and runs go (default: demo)")
    arguments = parser.parse_args(argv)
    try:
        demo(Path(arguments.folder).absolute(), say=lambda text: print(text, flush=True))  # noqa: T201
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        return job.EXIT_INTERRUPTED
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
