"""``python -m training.transport judge FILE_OR_FOLDER...``: which network do these NCCL logs prove?"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence

from training.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_TRANSPORT_NOT_PROVEN, BadInput
from training.transport import evidence, judge, verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 passed, or nothing was demanded; 4 failed or unproven; 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m training.transport", description="Proves from NCCL logs which network carried a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "judge",
        help="judge NCCL logs of one run",
        description="Judges the NCCL output (NCCL_DEBUG=INFO) of one run of any framework: logs of single ranks, of pods, or a driver's stream.",
        epilog="Exit codes: 0 passed, or nothing demanded; 4 failed or unproven; 2 bad input.",
    )
    command.add_argument("paths", nargs="+", metavar="FILE_OR_FOLDER", help="logs of every rank of one run; a folder is read with all below it")
    command.add_argument("--expect", choices=verdict.TRANSPORTS, default="efa", help="network that must have carried the run between hosts (default: efa)")
    command.add_argument("--hosts", type=_positive, metavar="N", help="hosts (pods) that the run had")
    command.add_argument("--ranks", type=_positive, metavar="N", help="ranks that the run had (default: as NCCL says)")
    command.add_argument("--nics", type=_positive, metavar="N", help="EFA NICs that each rank must have found")
    command.add_argument("--gpudirect", action="store_true", help="demand GPUDirect RDMA (p4d and later; g6 has none)")
    command.add_argument("--json", action="store_true", help="print the verdict as JSON")
    options = parser.parse_args(arguments)
    try:
        return _judge(options)
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        # The reader has gone (| head); what it has not read is no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 up")
    return number


def _judge(options: argparse.Namespace) -> int:
    files, notes = judge.files_in(options.paths)
    try:
        ranks = evidence.read_files(files)
    except OSError as error:
        raise BadInput(f"{error.filename}: can't be read ({error.strerror}); give files that you may read") from error
    found = verdict.judge(
        ranks,
        verdict.Expectation(options.expect, options.hosts, options.ranks, options.nics, options.gpudirect),
        judged_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    if options.json:
        sys.stdout.write(json.dumps({**found.as_dict(), "files": len(files)}, indent=2) + "\n")
    else:
        sys.stdout.write(judge.table(found, notes))
    sys.stdout.flush()
    return EXIT_DONE if found.ok else EXIT_TRANSPORT_NOT_PROVEN


if __name__ == "__main__":
    sys.exit(main())
