"""Bytes that a host's EFA devices and ordinary NICs moved, from the kernel's counters in sysfs; no privilege needed to read them.

EFA: ``/sys/class/infiniband/<device>/ports/<port>/hw_counters/{tx_bytes,rx_bytes,send_bytes,recv_bytes,rdma_*_bytes}``, names as in the Linux driver's
``drivers/infiniband/hw/efa/efa_verbs.c``. NICs: ``/sys/class/net/<interface>/statistics/{tx_bytes,rx_bytes}``; inside a pod these are the pod's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Bytes that leave by send, by RDMA write, and by answering a peer's RDMA read; and the same coming in. Used where a driver leaves them out of tx_bytes.
_OUT = ("send_bytes", "rdma_write_bytes", "rdma_read_resp_bytes")
_IN = ("recv_bytes", "rdma_write_recv_bytes", "rdma_read_bytes")
VIRTUAL_INTERFACES = ("lo", "docker", "veth", "br-", "cni", "virbr", "dummy", "tunl", "pod-id-link", "nodelocaldns")  # name prefixes


@dataclasses.dataclass(frozen=True)
class Reading:
    """Counters at one moment: device (``rdmap0s31/1``: device and port) or interface -> counter -> value. Empty: there are none, or they can't be read."""

    efa: Mapping[str, Mapping[str, int]]
    nic: Mapping[str, Mapping[str, int]]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"efa": {k: dict(v) for k, v in self.efa.items()}, "nic": {k: dict(v) for k, v in self.nic.items()}}


@dataclasses.dataclass(frozen=True)
class Moved:
    """Bytes sent and received between two readings of one host: device -> (sent, received). None: not known, with the reason in ``unknown``."""

    efa: Mapping[str, tuple[int, int]] | None
    nic: Mapping[str, tuple[int, int]] | None
    unknown: str = ""

    def total(self, kind: str) -> tuple[int, int] | None:
        """(sent, received) over all devices of ``kind`` efa or nic."""
        devices = self.efa if kind == "efa" else self.nic
        return None if devices is None else (sum(sent for sent, _ in devices.values()), sum(received for _, received in devices.values()))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data; :func:`moved_from_dict` is the inverse."""
        return {"efa": _plain(self.efa), "nic": _plain(self.nic), "unknown": self.unknown}


def _plain(devices: Mapping[str, tuple[int, int]] | None) -> dict[str, list[int]] | None:
    return None if devices is None else {name: list(both) for name, both in devices.items()}


def moved_from_dict(data: Mapping[str, Any]) -> Moved:
    """The bytes that :meth:`Moved.as_dict` wrote, perhaps through JSON."""
    efa, nic = ({name: (both[0], both[1]) for name, both in data[kind].items()} if data[kind] is not None else None for kind in ("efa", "nic"))
    return Moved(efa, nic, data["unknown"])


def read(sys: str | Path = "/sys") -> Reading:
    """The counters of this host (of this pod, for its NICs) as they stand. What can't be read is left out, never guessed."""
    efa = {}
    for port in sorted(Path(sys, "class/infiniband").glob("*/ports/*")):
        if _is_efa(port.parent.parent):
            values = {name: value for name in ("tx_bytes", "rx_bytes", *_OUT, *_IN) if (value := _number(port / "hw_counters" / name)) is not None}
            if values:
                efa[f"{port.parent.parent.name}/{port.name}"] = values
    nic = {}
    for interface in sorted(Path(sys, "class/net").glob("*/statistics")):
        if not interface.parent.name.startswith(VIRTUAL_INTERFACES):
            values = {name: value for name in ("tx_bytes", "rx_bytes") if (value := _number(interface / name)) is not None}
            if len(values) == 2:
                nic[interface.parent.name] = values
    return Reading(efa, nic)


def _is_efa(device: Path) -> bool:
    driver = device / "device" / "driver"
    if driver.exists():
        return driver.resolve().name == "efa"
    return device.name.startswith(("efa", "rdmap"))  # the names that rdma-core gives


def _number(path: Path) -> int | None:
    try:
        value = int(path.read_text())
    except (OSError, ValueError):
        return None
    return value if value >= 0 else None


def moved(before: Reading, after: Reading) -> Moved:
    """The difference of two readings of one host. A counter that fell has wrapped once, at 32 bits where the old value fits them, else at 64."""
    unknown = []
    parts: list[dict[str, tuple[int, int]] | None] = []
    for kind, old, new in (("EFA", before.efa, after.efa), ("NIC", before.nic, after.nic)):
        gone = sorted(set(old) - set(new))
        if not old or gone:
            unknown.append(f"{kind} counters of {', '.join(gone)} vanished" if gone else f"no {kind} counters in sysfs")
            parts.append(None)
            continue
        parts.append({name: (_sent(old[name], new[name]), _received(old[name], new[name])) for name in sorted(old)})
    return Moved(parts[0], parts[1], "; ".join(unknown))


def _sent(old: Mapping[str, int], new: Mapping[str, int]) -> int:
    return max(_grown(old, new, ("tx_bytes",)), _grown(old, new, _OUT))


def _received(old: Mapping[str, int], new: Mapping[str, int]) -> int:
    return max(_grown(old, new, ("rx_bytes",)), _grown(old, new, _IN))


def _grown(old: Mapping[str, int], new: Mapping[str, int], names: tuple[str, ...]) -> int:
    return sum(grown(old[name], new[name]) for name in names if name in old and name in new)


def grown(old: int, new: int) -> int:
    """How far a counter that may have wrapped once has come."""
    if new >= old:
        return new - old
    return new - old + (1 << 32 if old < 1 << 32 else 1 << 64)
