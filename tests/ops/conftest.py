"""These tests need the Pulumi program's environment; anywhere else they are collected and skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


class _Skipped(pytest.Module):
    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip("the Pulumi program's environment is .venv-pulumi (see requirements.txt)", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if HERE in module_path.parents and importlib.util.find_spec("pulumi_aws") is None:
        return _Skipped.from_parent(parent, path=module_path)
    return None


def pytest_configure(config: pytest.Config) -> None:
    # Classes that this project does not use warn when their package is imported.
    for package in ("pulumi_aws", "pulumi_eks"):
        config.addinivalue_line("filterwarnings", f"ignore::DeprecationWarning:{package}")


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
