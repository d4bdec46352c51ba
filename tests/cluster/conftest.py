"""The program on a real Kubernetes, driven by the real Pulumi engine. Skipped where one of the two is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from real import Stack, missing

from tests import tiers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark(items, __file__, "cluster", missing())


@pytest.fixture(scope="module")
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of the module's own, with data to train on unless the module says TRAINS = False."""
    made = Stack(tmp_path_factory.mktemp("program"))
    try:
        if getattr(request.module, "TRAINS", True):
            made.prepare_data()
        yield made
    finally:
        made.clean_up()
