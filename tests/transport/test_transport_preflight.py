"""The checks of a worker before NCCL starts, with real folders and real processes, and the environment it gets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from training.transport.preflight import Check, check_worker, environment, from_dict, log_file


def host(tmp_path: Path, devices: int = 1, interfaces: dict[str, str] | None = None) -> Path:
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    for number in range(devices):
        (tmp_path / f"dev/infiniband/uverbs{number}").touch()
    for name, state in (interfaces or {"lo": "unknown", "eth0": "up"}).items():
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
        (tmp_path / "sys/class/net" / name / "operstate").write_text(state + "\n")
    return tmp_path


def tool(tmp_path: Path, script: str) -> str:
    path = tmp_path / "fi_info"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return str(path)


GOOD = 'test "$1 $2" = "-p efa" && printf "provider: efa\\n    fabric: efa\\n    domain: rdmap0s6-rdm\\n"'


def checks(tmp_path: Path, **more: object) -> dict[str, Check]:
    arguments = {"root": tmp_path, "memlock": -1, **more}
    if "fi_info" not in more:
        arguments["fi_info"] = tool(tmp_path, GOOD)
    found = check_worker("gpu-a.internal", 1, **arguments)  # type: ignore[arg-type]
    assert found.host == "gpu-a", "NCCL names hosts up to the first dot"
    assert all(check.ok or check.do for check in found.checks), "every failed check says what to do"
    return {check.rule: check for check in found.checks}


def test_a_worker_with_all_it_needs_passes(tmp_path: Path) -> None:
    assert all(check.ok for check in checks(host(tmp_path)).values())


def test_a_pod_without_its_efa_device_is_told_to_request_it(tmp_path: Path) -> None:
    device = checks(host(tmp_path, devices=0))["device"]
    assert not device.ok
    assert "0 of 1" in device.saw
    assert "vpc.amazonaws.com/efa" in device.do


def test_fewer_devices_than_requested_fail(tmp_path: Path) -> None:
    found = check_worker("a", 4, root=host(tmp_path, devices=3), fi_info=tool(tmp_path, GOOD), memlock=-1)
    assert not found.ok
    assert "3 of 4" in found.checks[0].saw


@pytest.mark.parametrize(
    ("script", "saw"),
    [
        ("echo 'fi_getinfo: -61 (No data available)' >&2; exit 61", "-61"),
        ("exit 0", "ended with 0"),
        ("printf 'provider: tcp\\n'", "ended with 0"),
        ("printf 'provider: efa\\n'; exit 1", "ended with 1"),
        ("printf '\\377\\376'; exit 3", "ended with 3"),
    ],
)
def test_only_an_answer_of_the_efa_provider_counts(tmp_path: Path, script: str, saw: str) -> None:
    provider = checks(host(tmp_path), fi_info=tool(tmp_path, script))["provider"]
    assert not provider.ok
    assert saw in provider.saw


def test_a_tool_that_hangs_is_given_up(tmp_path: Path) -> None:
    provider = checks(host(tmp_path), fi_info=tool(tmp_path, "exec sleep 600"), timeout=0.3)["provider"]
    assert not provider.ok
    assert "no answer" in provider.saw


def test_a_missing_or_broken_tool_is_said(tmp_path: Path) -> None:
    assert "no fi_info" in checks(host(tmp_path), fi_info="no-such-fi_info")["provider"].saw
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF not really")
    broken.chmod(0o755)
    assert "can't be run" in checks(tmp_path, fi_info=str(broken))["provider"].saw


def test_a_tool_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool(tmp_path, GOOD)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert checks(host(tmp_path), fi_info="fi_info")["provider"].ok


@pytest.mark.parametrize(("limit", "ok"), [(-1, True), (64 * 1024, False), (8 << 20, False), (64 << 30, True)])
def test_locked_memory_must_be_unlimited_or_large(tmp_path: Path, limit: int, ok: bool) -> None:
    assert checks(host(tmp_path), memlock=limit)["memlock"].ok is ok


@pytest.mark.parametrize(
    ("interfaces", "ok"),
    [
        ({"lo": "unknown", "eth0": "up"}, True),
        ({"lo": "unknown", "ens5": "unknown"}, True),
        ({"lo": "unknown"}, False),
        ({"lo": "unknown", "docker0": "up", "pod-id-link0": "up"}, False),
        ({"lo": "unknown", "eth0": "down"}, False),
    ],
)
def test_the_bootstrap_interface_must_be_real_and_up(tmp_path: Path, interfaces: dict[str, str], ok: bool) -> None:
    assert checks(host(tmp_path, interfaces=interfaces))["interface"].ok is ok


def test_checks_survive_the_way_between_ranks(tmp_path: Path) -> None:
    found = check_worker("a", 2, root=host(tmp_path), fi_info=tool(tmp_path, GOOD))
    assert from_dict(json.loads(json.dumps(found.as_dict()))) == found


def test_efa_is_pinned_so_that_nccl_stops_rather_than_falls_back(tmp_path: Path) -> None:
    pinned = environment("efa", tmp_path, "qwen-1", 0, 3)
    assert pinned["NCCL_NET"] == "AWS Libfabric"
    assert pinned["FI_PROVIDER"] == "efa", "libfabric's tcp provider answers to the same network name"
    assert environment("tcp", tmp_path, "qwen-1", 0, 3)["NCCL_NET"] == "Socket"
    assert "NCCL_NET" not in environment("any", tmp_path, "qwen-1", 0, 3)
    for expect in ("efa", "tcp", "any"):
        told = environment(expect, tmp_path, "qwen-1", 0, 3)
        assert told["NCCL_DEBUG"] == "INFO"
        assert {"INIT", "NET", "ENV"} <= set(told["NCCL_DEBUG_SUBSYS"].split(","))
        excluded = told["NCCL_SOCKET_IFNAME"].removeprefix("^").split(",")
        assert told["NCCL_SOCKET_IFNAME"].startswith("^")
        assert {"lo", "docker", "pod-id-link"} <= set(excluded)
        assert not any("eth0".startswith(prefix) for prefix in excluded)


def test_every_rank_and_attempt_writes_a_file_of_its_own(tmp_path: Path) -> None:
    names = {log_file(tmp_path, run, attempt, rank) for run in ("a", "b") for attempt in (0, 1, 10) for rank in (0, 1, 10)}
    assert len(names) == 18
    assert environment("efa", tmp_path, "a", 1, 0)["NCCL_DEBUG_FILE"] == str(log_file(tmp_path, "a", 1, 0))
