"""The AWS program from VPC to a finished job: the simulated account of tests/aws_sim hands out a real Kubernetes of this machine."""

from __future__ import annotations

import pytest

from tests import tiers
from tests.chain.lab import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark(items, __file__, "chain", missing())
