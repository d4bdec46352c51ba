"""What the tiers of tests share: their marker, and the reason why they can't run here."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import pytest


def mark(items: Iterable[pytest.Item], conftest: str, tier: str, reason: str | None) -> None:
    """Gives the tests beside ``conftest`` the marker ``tier``, and skips them where there is a ``reason``."""
    for item in items:
        if Path(conftest).parent in item.path.parents:
            item.add_marker(getattr(pytest.mark, tier))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


class _Skipped(pytest.Module):
    def collect(self) -> Iterable[pytest.Item]:
        pytest.skip("the Pulumi program's environment is .venv-pulumi (see requirements.txt)", allow_module_level=True)


def module_of_the_program(module_path: Path, parent: pytest.Collector, conftest: str) -> pytest.Module | None:
    """For ``pytest_pycollect_makemodule``: outside the Pulumi program's environment the modules beside ``conftest`` are skipped."""
    if Path(conftest).parent in module_path.parents and importlib.util.find_spec("pulumi_aws") is None:
        return _Skipped.from_parent(parent, path=module_path)
    return None


def quiet_packages(config: pytest.Config) -> None:
    """Classes that this project does not use warn when their package is imported."""
    for package in ("pulumi_aws", "pulumi_eks"):
        config.addinivalue_line("filterwarnings", f"ignore::DeprecationWarning:{package}")
