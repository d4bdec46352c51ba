"""The programs that a stack needs on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from ops.findings import Finding

# pulumi: the program's error hooks need the engine of the SDK's own age (requirements.txt); aws: `eks get-token` with the API version that kubectl takes.
# https://docs.aws.amazon.com/eks/latest/userguide/create-kubeconfig.html
PROGRAMS = {
    "pulumi": (["pulumi", "version"], (3, 200, 0), "https://www.pulumi.com/docs/install/", "the engine that builds the stack"),
    "aws": (
        ["aws", "--version"],
        (2, 12, 3),
        "https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
        "gets the tokens for Kubernetes",
    ),
}
OLDEST_PYTHON = (3, 11)


def findings(needs_aws: bool = True) -> list[Finding]:
    """One for each program that is missing or too old, else one that names the versions."""
    problems: list[Finding] = []
    seen = ["Python " + ".".join(map(str, sys.version_info[:3]))]
    for name, (command, oldest, where, purpose) in PROGRAMS.items():
        if name == "aws" and not needs_aws:
            continue
        version = found_version(command)
        if version is None:
            problems.append(Finding("tools", "fail", f"{name} is not on PATH, or does not start", purpose, f"install it: {where}"))
        elif version < oldest and not (name == "aws" and (1, 27, 160) <= version < (2, 0, 0)):
            shown = ".".join(map(str, version))
            problems.append(Finding("tools", "warn", f"{name} {shown} is older than {'.'.join(map(str, oldest))}", purpose, f"install a newer one: {where}"))
        else:
            seen.append(f"{name} {'.'.join(map(str, version))}")
    if sys.version_info < OLDEST_PYTHON:
        problems.append(Finding("tools", "fail", f"{seen[0]} is too old", "the program is written for 3.11", "use Python 3.11 or newer"))
    return problems or [Finding("tools", "ok", ", ".join(seen))]


def found_version(command: list[str]) -> tuple[int, ...] | None:
    """The first ``1.2.3`` that a command prints; None where there is no such program, or it ends badly or not within ten seconds."""
    if shutil.which(command[0]) is None:
        return None
    quiet = {**os.environ, "PULUMI_SKIP_UPDATE_CHECK": "true"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False, env=quiet)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", done.stdout + done.stderr)
    return tuple(int(part) for part in match.groups()) if match and done.returncode == 0 else None
