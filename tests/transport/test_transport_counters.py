"""Byte counters, read from folder trees that look like the kernel's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.transport.counters import Moved, grown, moved, moved_from_dict, read


def efa(root: Path, device: str, driver: str | None = "efa", **values: int | str) -> None:
    folder = root / "class/infiniband" / device / "ports/1/hw_counters"
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name).write_text(f"{value}\n")
    if driver is not None:
        target = root / "bus/drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        (root / "class/infiniband" / device / "device").mkdir(exist_ok=True)
        link = root / "class/infiniband" / device / "device/driver"
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def nic(root: Path, name: str, sent: int, received: int) -> None:
    folder = root / "class/net" / name / "statistics"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tx_bytes").write_text(f"{sent}\n")
    (folder / "rx_bytes").write_text(f"{received}\n")


def test_bytes_of_every_device_and_interface_are_counted(tmp_path: Path) -> None:
    efa(tmp_path, "rdmap0s6", tx_bytes=100, rx_bytes=200, tx_pkts=9)
    efa(tmp_path, "rdmap0s7", tx_bytes=5, rx_bytes=5)
    nic(tmp_path, "eth0", 7, 8)
    before = read(tmp_path)
    efa(tmp_path, "rdmap0s6", tx_bytes=1100, rx_bytes=2200, tx_pkts=90)
    nic(tmp_path, "eth0", 17, 28)
    difference = moved(before, read(tmp_path))
    assert difference.efa == {"rdmap0s6/1": (1000, 2000), "rdmap0s7/1": (0, 0)}
    assert (difference.total("efa"), difference.total("nic")) == ((1000, 2000), (10, 20))
    assert moved_from_dict(json.loads(json.dumps(difference.as_dict()))) == difference


def test_rdma_bytes_count_where_the_plain_counters_leave_them_out(tmp_path: Path) -> None:
    zero = {"tx_bytes": 0, "rx_bytes": 0, "send_bytes": 0, "recv_bytes": 0, "rdma_write_bytes": 0, "rdma_write_recv_bytes": 0}
    efa(tmp_path, "rdmap0s6", **zero)
    before = read(tmp_path)
    efa(tmp_path, "rdmap0s6", **zero | {"tx_bytes": 10, "rx_bytes": 10, "send_bytes": 10, "rdma_write_bytes": 5000, "rdma_write_recv_bytes": 6000})
    assert moved(before, read(tmp_path)).total("efa") == (5010, 6000)


def test_other_rdma_devices_and_virtual_interfaces_are_not_counted(tmp_path: Path) -> None:
    efa(tmp_path, "mlx5_0", driver="mlx5_core", tx_bytes=1, rx_bytes=1)
    efa(tmp_path, "mlx5_1", driver=None, tx_bytes=1, rx_bytes=1)
    efa(tmp_path, "rdmap9s0", driver=None, tx_bytes=1, rx_bytes=1)
    for name in ("lo", "docker0", "veth12ab", "pod-id-link0", "eth0"):
        nic(tmp_path, name, 1, 1)
    found = read(tmp_path)
    assert set(found.efa) == {"rdmap9s0/1"}
    assert set(found.nic) == {"eth0"}


def test_absent_or_unreadable_counters_are_unknown_not_zero(tmp_path: Path) -> None:
    efa(tmp_path, "rdmap0s6", tx_bytes="not a number", rx_bytes="")
    empty = moved(read(tmp_path), read(tmp_path))
    assert (empty.efa, empty.nic) == (None, None)
    assert "no EFA counters" in empty.unknown
    assert "no NIC counters" in empty.unknown


def test_a_device_that_vanished_makes_its_bytes_unknown(tmp_path: Path) -> None:
    efa(tmp_path / "a", "rdmap0s6", tx_bytes=1, rx_bytes=1)
    difference = moved(read(tmp_path / "a"), read(tmp_path / "b"))
    assert difference.efa is None
    assert "rdmap0s6/1 vanished" in difference.unknown


@given(start=st.integers(0, 2**64 - 1), step=st.integers(0, 2**63))
def test_a_64_bit_counter_may_wrap(start: int, step: int) -> None:
    end = (start + step) % 2**64
    if end < start and start < 2**32:
        return  # can't be: a step below 2^63 doesn't wrap from there
    assert grown(start, end) == step


@given(start=st.integers(0, 2**32 - 1), step=st.integers(0, 2**32 - 1))
def test_a_32_bit_counter_may_wrap(start: int, step: int) -> None:
    assert grown(start, (start + step) % 2**32) == step


def test_this_machines_own_counters_can_be_read_without_privilege() -> None:
    if not list(Path("/sys/class/net").glob("*/statistics")):
        pytest.skip("no /sys/class/net here")
    difference = moved(read(), read())
    assert isinstance(difference, Moved)
    assert all(sent >= 0 and received >= 0 for sent, received in (difference.nic or {}).values())
