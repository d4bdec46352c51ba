"""The real Pulumi engine against a simulated AWS account. Skipped where the simulator or the engine is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated import Account, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.aws_sim)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def new_account(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Account]:
    def make(settings: dict[str, Any] | None = None) -> Account:
        """Of Pulumi.dev.yaml as it is, or of a stack file with these settings alone."""
        account = Account(tmp_path_factory.mktemp("account") / "home")
        if settings is not None:
            account.write(settings)
        account.init()
        return account

    return make
