"""These tests need the Pulumi program's environment; anywhere else they are collected and skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

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
