"""What the engine's state tells: pure functions over the resources of `pulumi stack export`, and the times in there and elsewhere."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

KUBERNETES = ("kubernetes:", "pulumi:providers:kubernetes")


def real(resources: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What stands for something that exists: no stack, component or provider."""
    return [found for found in resources if found.get("custom") and not str(found["type"]).startswith("pulumi:")]


def of_kubernetes(resource: Mapping[str, Any]) -> bool:
    return str(resource["type"]).startswith(KUBERNETES)


def account(resources: Sequence[Mapping[str, Any]]) -> str | None:
    """The AWS account that the state's ARNs name."""
    for resource in resources:
        if found := re.match(r"arn:aws[a-z-]*:[^:]*:[^:]*:(\d{12}):", str((resource.get("outputs") or {}).get("arn") or "")):
            return found[1]
    return None


def failed_group(resource: Mapping[str, Any]) -> bool:
    """A node group that is recorded, and never came up."""
    failed = (resource.get("outputs") or {}).get("status") == "CREATE_FAILED" or bool(resource.get("initErrors"))
    return resource["type"] == "aws:eks/nodeGroup:NodeGroup" and failed


def is_job(resource: Mapping[str, Any]) -> bool:
    return str(resource["type"]).endswith(":RayJob")


def outputs(resources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return next((dict(found.get("outputs") or {}) for found in resources if found["type"] == "pulumi:pulumi:Stack"), {})


def up_since(resources: Sequence[Mapping[str, Any]]) -> datetime.datetime | None:
    made = [found for found in (time_of(resource.get("created")) for resource in real(resources)) if found]
    return min(made, default=None)


def time_of(text: Any) -> datetime.datetime | None:
    if not text:
        return None
    try:
        found = datetime.datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


def stop_time(text: Any) -> datetime.datetime | None:
    return time_of(text) if isinstance(text, str) and text[:1].isdigit() else None


def at(seconds: float | None) -> datetime.datetime | None:
    return None if seconds is None else datetime.datetime.fromtimestamp(seconds, datetime.UTC)
