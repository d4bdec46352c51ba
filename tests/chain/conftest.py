"""The AWS program from VPC to a finished job: the simulated account of tests/aws_sim hands out a real Kubernetes of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chain.lab import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.chain)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
