"""A stack by its name: the stack file, checked, and the account and region that it means."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import config
import naming
from ops.aws import Aws
from ops.errors import BadInput

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Target:
    """What a stack file says. region and profile are None where it names none."""

    name: str
    file: Path
    settings: config.Stack
    region: str | None
    profile: str | None
    allowed_accounts: tuple[str, ...]

    @property
    def prefix(self) -> str:
        """How everything of the stack is named: ``ray-train-efa-dev``; the cluster has exactly this name."""
        return naming.prefix(config.PROJECT, self.name)

    def aws(self) -> Aws:
        """The account with the stack's own profile and region. Raises BadInput where there is none."""
        return Aws(self.region, self.profile)

    def tags(self, account: str, region: str) -> dict[str, str]:
        """The tags that everything of this stack carries."""
        return naming.base_tags(config.PROJECT, self.name, self.settings.owner, naming.deployment_id(config.PROJECT, self.name, account, region))


def known(folder: Path | None = None) -> list[str]:
    """Names of the stacks that have a file, sorted."""
    return sorted(path.name.removeprefix("Pulumi.").removesuffix(".yaml") for path in (folder or ROOT).glob("Pulumi.*.yaml"))


def read(name: str, folder: Path | None = None, *, keep_pins: bool = True) -> Target:
    """The stack called ``name``: of ``Pulumi.<name>.yaml`` in ``folder`` (default: the project). Raises BadInput.

    Without keep_pins all pins but the zone are left out: those of another Kubernetes version must not stop who wants to write new ones.
    """
    place = folder or ROOT
    file = place / f"Pulumi.{name}.yaml"
    if not file.is_file():
        others = ", ".join(known(place)) or "none"
        raise BadInput(f"there is no stack {name!r}: {file} is missing. Stacks here: {others}; `pulumi stack init {name}` makes a new one")
    found = mapping(file)
    values = {key.removeprefix(f"{config.PROJECT}:"): plain_secret(value) for key, value in found.items() if str(key).startswith(f"{config.PROJECT}:")}
    if not keep_pins and isinstance(values.get("pins"), Mapping):
        values["pins"] = {key: value for key, value in values["pins"].items() if key == "zone"}
    region = _text(found.get("aws:region")) or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    allowed = found.get("aws:allowedAccountIds") or []
    return Target(
        name=name,
        file=file,
        settings=config.load(values, region),
        region=region,
        profile=_text(found.get("aws:profile")),
        allowed_accounts=tuple(str(account) for account in (allowed if isinstance(allowed, list) else [allowed])),
    )


def mapping(file: Path) -> dict[str, Any]:
    """The ``config`` mapping of a stack file. Raises BadInput where it can't be read."""
    try:
        whole = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: can't be read ({error})") from error
    except yaml.YAMLError as error:
        raise BadInput(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error
    found = (whole or {}).get("config") if isinstance(whole or {}, Mapping) else None
    if not isinstance(found or {}, Mapping):
        raise BadInput(f"{file}: `config` must be a mapping of keys to values")
    return dict(found or {})


def plain_secret(value: Any) -> Any:
    """An encrypted value stands for a text that only the engine reads; what matters here is that there is one."""
    return "(encrypted)" if isinstance(value, Mapping) and set(value) == {"secure"} else value


def _text(value: Any) -> str | None:
    return str(value) if value else None
