"""What a look at an account finds: what is so, why it matters, what to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

# ok; note: worth knowing; warn: may hurt; unknown: could not be asked; fail: `up` would fail or build the wrong thing.
LEVELS = ("fail", "warn", "unknown", "note", "ok")


@dataclasses.dataclass(frozen=True)
class Finding:
    """check: what was looked at; do is empty where nothing has to be done."""

    check: str
    level: str
    what: str
    why: str = ""
    do: str = ""


def sort(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; within a level in the order given."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def failed(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "fail"]
