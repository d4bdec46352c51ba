"""Runs a program until it has told its result, or for a while, and leaves nothing of it behind: a Ray lingers, and so does its GPU memory.

    python -m benchmarks.alone 120 python -m benchmarks.peers sample

Linux: what loses its parent becomes this process's child.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h"""


def adopt() -> None:
    """From now on orphans among this process's descendants are its children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end() -> None:
    """Kills all that this thread has started or the process has adopted, and waits until it is gone."""
    while True:
        for child in Path("/proc/self/task", str(threading.get_native_id()), "children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def result_in(text: str) -> dict[str, Any] | None:
    """The last line's JSON object that tells a speed or an error."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line[line.find("{") :]) if "{" in line else None
        except ValueError:
            continue
        if isinstance(found, dict) and ("tokensPerSecond" in found or "error" in found):
            return found
    return None


def run(command: list[str], limit: float) -> dict[str, Any]:
    """The result of ``command``; ``error`` with the end of what it said where it ends without one, or has none after ``limit`` seconds."""
    adopt()
    with tempfile.TemporaryFile("w+") as output:
        began = time.monotonic()
        program = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                ended = program.poll() is not None
                output.seek(0)
                text = output.read()
                found = result_in(text)
                if found or ended:
                    return found or {"error": text.strip()[-1500:]}
                if time.monotonic() - began > limit:
                    return {"error": f"not done after {limit:.0f} s: {text.strip()[-1500:]}"}
                time.sleep(0.1)
        finally:
            end()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(sys.argv[2:], float(sys.argv[1]))) + "\n")
