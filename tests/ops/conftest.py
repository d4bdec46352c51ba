"""These tests need the Pulumi program's environment; anywhere else they are collected and skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiers


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return tiers.module_of_the_program(module_path, parent, __file__)


def pytest_configure(config: pytest.Config) -> None:
    tiers.quiet_packages(config)


@pytest.fixture(scope="session")
def aws_server() -> Iterator[Any]:
    """One AWS for all tests: see account_server.py."""
    from tests.ops.account_server import Server

    server = Server()
    yield server
    server.stop()


@pytest.fixture
def account(aws_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fresh account; this process and those that it starts speak to it, and to no other."""
    from tests.ops.account_server import KEYS

    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_server.url)
    return aws_server.reset()
