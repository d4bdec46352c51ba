"""A simulated AWS account for the real Pulumi engine: the simulator's commands, a state backend and a copy of the program of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
LAB = Path(os.environ.get("AWS_SIM_LAB", ROOT.parent / "shared" / "lab"))
TOOLS = Path(os.environ.get("LAB_HOME", "/var/tmp/lab")) / "bin"
PROGRAMS = ("pulumi", "pulumi-resource-kubernetes", "etcd", "kube")
PROGRAM = ("Pulumi.yaml", "Pulumi.dev.yaml", *(path.name for path in ROOT.glob("*.py")), "prices.json", "infra", "workloads", "training")


def missing() -> str | None:
    if not (LAB / "aws_sim" / "run").exists():
        return f"no AWS simulator at {LAB}/aws_sim (AWS_SIM_LAB names another place)"
    if absent := [name for name in PROGRAMS if not (TOOLS / name).exists()]:
        return f"no {' and no '.join(absent)} in {TOOLS} (LAB_HOME names another place)"
    if not shutil.which("openssl"):
        return "no openssl, which makes the API server's key for service accounts"
    if importlib.util.find_spec("pulumi_aws") is None:
        return "the Pulumi program's environment is .venv-pulumi (see requirements.txt)"
    return None


@dataclasses.dataclass
class Account:
    """A simulated account, a state backend and a copy of the program of its own."""

    home: Path
    stack: str = "dev"
    kubeconfig: Path | None = None  # of the Kubernetes that the simulated EKS hands out

    def __post_init__(self) -> None:
        if self.project.exists():  # another stack of the same program
            return
        self.project.mkdir(parents=True)
        for source in (found for name in PROGRAM for found in ROOT.glob(name)):
            if source.is_dir():
                shutil.copytree(source, self.project / source.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, self.project / source.name)
        if self.kubeconfig is None:
            # The half that needs a Kubernetes.
            with (self.project / "workloads" / "build.py").open("a") as file:
                file.write("\n\ndef build(*_):\n    return {}\n")
        (self.project / ".venv-pulumi").symlink_to(sys.prefix)  # where Pulumi.yaml says the interpreter is

    @property
    def project(self) -> Path:
        return self.home / "project"

    def environment(self, simulation: dict[str, Any] | Path | None, time_scale: float | None = None) -> dict[str, str]:
        environment = {**os.environ, "SIM_HOME": str(self.home / "sim"), "SIM_PYTHON": sys.executable, "PYTHONDONTWRITEBYTECODE": "1"}
        if isinstance(simulation, dict):
            file = self.home / "simulation.yaml"
            file.write_text(yaml.safe_dump(simulation))
            simulation = file
        if simulation is not None:
            environment["SIM_CONFIG"] = str(simulation)
        if self.kubeconfig is not None:
            environment["SIM_KUBECONFIG"] = str(self.kubeconfig)
        if time_scale is not None:
            environment["SIM_TIME_SCALE"] = str(time_scale)
        return environment

    def command(self, *arguments: str) -> list[str]:
        # A named number of slots: the engine's default depends on the machine, and waiting for a slot hides a missing edge.
        parallel = ["--parallel", "32"] if arguments[0] in ("up", "preview", "destroy", "refresh") else []
        quiet = ["--non-interactive", "--color", "never"]
        return [str(LAB / "aws_sim" / "run"), "pulumi", *arguments, "--stack", self.stack, *parallel, *quiet]

    def pulumi(self, *arguments: str, simulation: dict[str, Any] | Path | None = None, code: int | None = 0, limit: float = 300) -> str:
        """What the command says. limit: seconds after which it has failed."""
        done = subprocess.run(
            self.command(*arguments), cwd=self.project, env=self.environment(simulation), capture_output=True, text=True, timeout=limit, check=False
        )
        text = done.stdout + done.stderr
        assert code is None or done.returncode == code, f"pulumi {' '.join(arguments)} ended with {done.returncode}:\n{text[-6000:]}"
        return text

    def shell(self, commands: str) -> str:
        """What shell commands say that a person would type in the project's folder, with this stack selected."""
        command = [str(LAB / "aws_sim" / "run"), "bash", "-euo", "pipefail", "-c", commands]
        environment = {**self.environment(None), "PULUMI_STACK": self.stack}
        done = subprocess.run(command, cwd=self.project, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"{commands} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}"
        return done.stdout

    def up(self, **how: Any) -> str:
        return self.pulumi("up", "--yes", "--skip-preview", **how)

    def destroy(self, **how: Any) -> str:
        return self.pulumi("destroy", "--yes", "--skip-preview", **how)

    def sim(self, *arguments: str, stdin: str | None = None, simulation: dict[str, Any] | Path | None = None) -> str:
        command = [str(LAB / "aws_sim" / "sim"), *arguments]
        done = subprocess.run(command, env=self.environment(simulation), input=stdin, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    def report(self) -> dict[str, Any]:
        return dict(json.loads(self.sim("report", "--json")))

    @property
    def started(self) -> bool:
        """Whether there has been a command."""
        return (self.home / "sim" / "account.db").exists()

    def resources(self, token: str) -> list[dict[str, Any]]:
        """What the account holds of a kind and has finished making, inputs over outputs; readable while a command is at work."""
        with contextlib.closing(sqlite3.connect(f"file:{self.home / 'sim' / 'account.db'}?mode=ro", uri=True, timeout=30)) as state:
            found = state.execute("select inputs, outputs from resources where token = ? and status = 'ACTIVE' order by rid", (token,)).fetchall()
        return [{**json.loads(outputs), **json.loads(inputs)} for inputs, outputs in found]

    def audit(self) -> str:
        return self.sim("audit", stdin=self.pulumi("stack", "export"))

    @property
    def stack_file(self) -> Path:
        return self.project / f"Pulumi.{self.stack}.yaml"

    def write(self, settings: dict[str, Any]) -> None:
        """Makes the stack file say these settings ({"gpu": {...}}) and no others."""
        named = {f"ray-train-efa:{key}": value for key, value in settings.items()}
        self.stack_file.write_text(yaml.safe_dump({"config": {"aws:region": "us-west-2", **named}}))

    def configure(self, settings: dict[str, Any]) -> None:
        """Lays settings over what the stack file says."""
        found = yaml.safe_load(self.stack_file.read_text())
        for key, value in settings.items():
            full = f"ray-train-efa:{key}"
            found["config"][full] = {**found["config"].get(full, {}), **value}
        self.stack_file.write_text(yaml.safe_dump(found))

    def init(self) -> None:
        """`stack init` writes the encryption salt into the stack file."""
        self.pulumi("stack", "init")
