"""The training job: ``python -m training.job --config FILE [--set key=value ...]``.

The same run under Ray Train (the default), under ``torchrun --nproc-per-node N -m training.job ...``, or in this process
(``--launcher process``). Exit codes: 0 done, 2 bad input, 3 training failed, 4 transport not proven, 130 interrupted, 143 ended by SIGTERM
after a checkpoint (torchrun, process; a second SIGTERM ends at once).
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from training import schema
from training.errors import EXIT_DONE, JobError, StartAgain, Terminated, TrainingFailed
from training.notice import Notice, terminated
from training.settings import Settings, load

EXIT_INTERRUPTED = 130


def run(settings: Settings, launcher: str = "auto", say: Callable[[str], None] = print) -> dict[str, Any]:
    """Runs the job to its end and returns its summary (rank 0's; under torchrun every rank's own). Raises JobError.

    launcher: ray, process (this process alone), torchrun, or auto (torchrun where RANK is set, else ray).
    """
    from training import checks  # torch and transformers take seconds to import; a mistyped setting should not wait for them

    settings = absolute(settings)
    if launcher == "auto":
        launcher = "torchrun" if "RANK" in os.environ else "ray"
    job = checks.check(settings)
    checks.check_tokenizer(job)
    try:
        if launcher == "ray":
            from training import launch_ray

            summary = launch_ray.run(settings, say)
        else:
            summary = _here(settings, say)
    except JobError:
        raise
    except Exception as error:
        trace = job.folder / "failure.txt"
        try:
            trace.write_bytes(traceback.format_exc().encode())
            kept = f"the whole trace is in {trace}"
        except OSError as refused:  # a full disk may be what stopped the run
            kept = f"its trace could not be written to {trace} ({refused})"
        raise TrainingFailed(f"training stopped: {type(error).__name__}: {error}; {kept}. Start the same command again to go on") from error
    if os.environ.get("RANK", "0") == "0":
        summary["report"] = _report(job.folder, say)
    return summary


def _here(settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """The run in this process; again, and otherwise, where what was tried first does not work on this GPU."""
    from training import worker
    from training.world import process_group

    def end(notice: Notice) -> None:
        raise Terminated(f"ended by a signal ({notice.reason}); start the same command again to go on from the checkpoint that was just written")

    while True:
        gc.collect()  # what a trial that failed had on the GPU hangs in its traceback
        with terminated() as notice, process_group(settings.device, settings.collective_timeout) as world:
            try:
                return worker.run_rank(settings, world, worker.Hooks(say, notice=notice, saved=end))
            except StartAgain as error:
                if world.size > 1:  # the other ranks' collectives end only with their processes
                    raise
                say(f"{error}")


def _report(folder: Any, say: Callable[[str], None]) -> str | None:
    from training.report import write_report

    try:
        return str(write_report(folder))
    except JobError as error:
        say(f"no report: {error}")
        return None


def absolute(settings: Settings) -> Settings:
    """``settings`` with local paths made absolute: Ray's workers start in a folder of their own."""

    def whole(uri: str) -> str:
        return uri if "://" in uri else os.path.abspath(os.path.expanduser(uri))

    model = settings.model
    if model.pretrained is not None and (model.pretrained.startswith((".", "~")) or os.path.exists(model.pretrained)):
        model = dataclasses.replace(model, pretrained=whole(model.pretrained))
    return dataclasses.replace(settings, data=whole(settings.data), storage=whole(settings.storage), model=model)


def _settings_table() -> str:
    lines = []
    for key, default, meaning in schema.describe(Settings):
        lines.append(f"{key}  (default: {default})")
        lines += textwrap.wrap(meaning, 76, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """What a person is told at the end."""
    lines = [f"done: {summary['run']}, step {summary['step']}"]
    if "loss" in summary:
        lines[0] += f", training loss {summary['loss']:.4f}"
    if "evalLoss" in summary:
        lines[0] += f", held-out loss {summary['evalLoss']:.4f} (perplexity {summary['perplexity']:.2f})"
    if summary.get("transport"):
        lines.append(f"  {summary['transport']}")
    if summary.get("slowest"):
        lines.append(f"  {summary['slowest']}")
    lines.append(f"  run      {summary['folder']}")
    if summary.get("report"):
        lines.append(f"  report   {summary['report']}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m training.job", description=(__doc__ or "").split("\n\n", 1)[1], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="one setting, over the file's; may be repeated")
    parser.add_argument("--launcher", choices=("auto", "ray", "torchrun", "process"), default="auto", help="default: torchrun where it started this, else ray")
    parser.add_argument("--help-settings", action="store_true", help="list every setting with its default and meaning, and exit")
    arguments = parser.parse_args(argv)
    if arguments.help_settings:
        print(_settings_table())  # noqa: T201
        return EXIT_DONE
    speaks = os.environ.get("RANK", "0") == "0"

    def say(text: str) -> None:
        if speaks:
            print(text, flush=True)  # noqa: T201

    try:
        summary = run(load(arguments.config, arguments.set), arguments.launcher, say)
    except JobError as error:
        if speaks:
            print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted; start the same command again to go on from the last checkpoint")
        return EXIT_INTERRUPTED
    for line in summary_lines(summary):
        say(line)
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
