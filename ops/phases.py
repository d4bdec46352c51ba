"""What an `up` or `down` is doing, told by the program's parts: the engine's events as plain data in, a table's rows out."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence

WAITING, WORKING, DONE, SAME, FAILED = "waiting", "working", "done", "unchanged", "failed"
TOKEN = "ray-train-efa:"  # noqa: S105 - the prefix of the program's component types


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the program. usual_up, usual_down: how long it takes, in words; empty where seconds."""

    token: str
    title: str
    usual_up: str = ""
    usual_down: str = ""


# In order of creation. Times: docs/aws.md (AWS's own sample for control plane and GPU nodes), docs/kubernetes.md.
PARTS = (
    Part("infra:Network", "network", "2-3 min", "2-3 min"),
    Part("infra:Storage", "storage"),
    Part("infra:NodeRole", "rights of the nodes"),
    Part("infra:ControlPlane", "control plane", "9-20 min", "2-10 min"),
    Part("infra:AutoStop", "auto-stop"),
    Part("infra:SystemNodes", "system nodes", "2-4 min", "3-6 min"),
    Part("infra:GpuNodes", "GPU nodes", "3-5 min", "3-10 min"),
    Part("infra:Identity", "rights of the job"),
    Part("workloads:ClusterAccess", "Kubernetes access"),
    Part("workloads:DevicePlugins", "device plugins", "1-2 min"),
    Part("workloads:Operator", "KubeRay operator", "1 min"),
    Part("workloads:RayCluster", "Ray cluster", "1 min; first pull 5-10", "1-2 min"),
    Part("workloads:TrainingJob", "training job", "", "1 min"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A part's state. seconds: from its first change to its last, or to now while it works. quiet: seconds since its last change."""

    title: str
    state: str
    done: int
    known: int
    seconds: float
    usual: str
    now: tuple[str, ...] = ()
    quiet: float = 0.0


@dataclasses.dataclass
class _Resource:
    part: Part
    kind: str
    state: str
    began: float
    ended: float | None = None


class Progress:
    """Gathers events of one operation: up, destroy (which turns order and usual durations around) or refresh. Times are seconds of any one clock.

    detail: what the program itself last said; note: what a person must know now.
    """

    def __init__(self, began: float, kind: str = "up") -> None:
        self.began = began
        self.kind = kind
        self.note = ""
        self.detail = ""
        self._resources: dict[str, _Resource] = {}
        # Events come in one thread, and another draws.
        self._lock = threading.Lock()

    def started(self, urn: str, op: str, at: float) -> None:
        """A resource is about to be changed, or found to be as it should."""
        part = part_of(urn)
        if part is None or own_kind(urn).startswith(TOKEN):
            return
        with self._lock:
            # The steps of a replacement follow each other under one name.
            before = self._resources.get(urn)
            began = before.began if before and before.state in (WORKING, DONE) else at
            self._resources[urn] = _Resource(part, kind_of(urn), SAME if op in ("same", "read") else WORKING, began)

    def finished(self, urn: str, op: str, at: float) -> None:
        with self._lock:
            found = self._resources.get(urn)
            if found and found.state == WORKING:
                found.state, found.ended = (SAME if op in ("same", "read") else DONE), at

    def failed(self, urn: str, at: float) -> None:
        with self._lock:
            found = self._resources.get(urn)
            if found:
                found.state, found.ended = FAILED, at

    def rows(self, at: float) -> tuple[Row, ...]:
        """The parts that this operation knows of so far, in the order in which they are worked on."""
        with self._lock:
            found = [dataclasses.replace(resource) for resource in self._resources.values()]
        rows = [row for part in PARTS if (row := self._row(part, [resource for resource in found if resource.part == part], at))]
        return tuple(reversed(rows)) if self.kind == "destroy" else tuple(rows)

    def _row(self, part: Part, mine: Sequence[_Resource], at: float) -> Row | None:
        if not mine:
            return None
        states = {resource.state for resource in mine}
        changed = [resource for resource in mine if resource.state != SAME]
        began = min((resource.began for resource in changed), default=at)
        ended = max((resource.ended if resource.ended is not None else at for resource in changed), default=at)
        state = next((s for s in (FAILED, WORKING, DONE) if s in states), SAME)
        working = tuple(sorted({resource.kind for resource in mine if resource.state == WORKING}))
        usual = {"up": part.usual_up, "destroy": part.usual_down}.get(self.kind, "")
        done = sum(resource.state in (DONE, SAME) for resource in mine)
        return Row(part.title, state, done, len(mine), ended - began, usual, working, at - ended)


def part_of(urn: str) -> Part | None:
    """The part of the program that a resource belongs to, by the component at the top of its type."""
    for token in types_of(urn):
        if token.startswith(TOKEN):
            return next((part for part in PARTS if token == TOKEN + part.token), None)
    return None


def types_of(urn: str) -> Sequence[str]:
    """The types from the outermost component to the resource's own."""
    fields = urn.split("::")
    return fields[2].split("$") if len(fields) > 3 else []


def own_kind(urn: str) -> str:
    """``aws:ec2/vpc:Vpc``."""
    types = types_of(urn)
    return types[-1] if types else ""


def kind_of(urn: str) -> str:
    """``Vpc``: what a person calls it."""
    return own_kind(urn).rsplit(":", 1)[-1]


def name_of(urn: str) -> str:
    """The resource's name in the program."""
    return urn.rsplit("::", 1)[-1]


def changes_text(changes: Mapping[str, int]) -> str:
    """``13 created, 2 unchanged``."""
    words = {"create": "created", "update": "updated", "delete": "deleted", "replace": "replaced", "same": "unchanged"}
    return ", ".join(f"{changes[op]} {word}" for op, word in words.items() if changes.get(op)) or "nothing to do"
