"""These tests need the Pulumi program's environment; anywhere else they are collected and skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiers


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return tiers.module_of_the_program(module_path, parent, __file__)


def pytest_configure(config: pytest.Config) -> None:
    tiers.quiet_packages(config)
