"""The program's folder and what its stack files say, read without the engine."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml

import config
import naming
from config import BadInput

ROOT = Path(__file__).resolve().parents[1]
STACK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


@dataclasses.dataclass(frozen=True)
class Project:
    """One stack of the program in ``folder``."""

    folder: Path
    stack: str

    @property
    def file(self) -> Path:
        return self.folder / f"Pulumi.{self.stack}.yaml"

    @property
    def prefix(self) -> str:
        """``ray-train-efa-dev``: the name of the Ray cluster, and the beginning of every other."""
        return naming.prefix(self.name, self.stack)

    @property
    def name(self) -> str:
        found = yaml.safe_load((self.folder / "Pulumi.yaml").read_text(encoding="utf-8"))
        return str(found["name"])

    def values(self) -> dict[str, Any]:
        """What the stack file says, keys without the project's name, secrets left out."""
        values, _ = config.read_stack_file(str(self.file))
        return {key: value for key, value in values.items() if key not in config.SECRETS}

    def aws(self, key: str) -> str | None:
        """``aws:KEY`` of the stack file (region, profile)."""
        found = (yaml.safe_load(self.file.read_text(encoding="utf-8")) or {}).get("config") or {}
        value = found.get(f"aws:{key}")
        return None if value is None else str(value)

    def read(self) -> config.Stack:
        """The stack's settings. Raises BadInput with every problem."""
        return config.load(self.values(), self.aws("region"))


def project(stack: str, folder: Path | None = None) -> Project:
    """The stack ``stack`` of the program in ``folder`` (this checkout's). Raises BadInput where there is no such stack file."""
    found = Project((folder or ROOT).resolve(), stack)
    if not STACK_NAME.fullmatch(stack):
        raise BadInput(f"{stack!r} is no name of a stack; use letters, digits, '.', '_' and '-', such as dev")
    if not (found.folder / "Pulumi.yaml").exists():
        raise BadInput(f"{found.folder} holds no Pulumi.yaml; give the folder of the program")
    if not found.file.exists():
        known = sorted(path.name.removeprefix("Pulumi.").removesuffix(".yaml") for path in found.folder.glob("Pulumi.*.yaml"))
        raise BadInput(f"no stack {stack!r}: {found.file} is missing; there are {', '.join(known) or 'none'}. Copy one of these files, or name another stack")
    return found
