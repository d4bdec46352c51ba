"""Names and tags: everything named carries the stack's name, everything taggable says whose it is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

# IAM role names end at 64 characters; the longest suffix is "-control-plane" and 8 random ones.
LONGEST_PREFIX = 40

Tags = Mapping[str, str]


def prefix(project: str, stack: str) -> str:
    """``ray-train-efa-dev``: in lower case, for bucket names have no other."""
    return re.sub(r"[^a-z0-9-]+", "-", f"{project}-{stack}".lower()).strip("-")


def deployment_id(project: str, stack: str, account: str, region: str) -> str:
    """8 hex digits that are the same at each `up` and differ between stacks, accounts and regions: finds leftovers without the state."""
    return hashlib.sha256(f"{project}/{stack}/{account}/{region}".encode()).hexdigest()[:8]


def base_tags(project: str, stack: str, owner: str, deployment: str) -> dict[str, str]:
    return {"project": project, "stack": stack, "owner": owner, "deployment": deployment}


def named(tags: Tags, name: str) -> dict[str, str]:
    """``tags`` with the Name that consoles show."""
    return {**tags, "Name": name}
