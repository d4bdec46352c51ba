"""The real Pulumi engine against a simulated AWS account. Skipped where the simulator or the engine is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import versions
from tests import tiers
from tests.aws_sim.api_server import Inhabitants, Kubernetes, charts, running
from tests.aws_sim.simulated import Account, missing

# Never starts where there are no pods, so its data need not be.
TRAINING = {"run": True, "model": {"random": "tiny"}, "data": "s3://data/prepared", "steps": 20}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark(items, __file__, "aws_sim", missing())


class Accounts:
    """Makes accounts, one after the other. At most one has a Kubernetes: that of the account before is stopped."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.folders, self._kubernetes = folders, contextlib.ExitStack()

    def stop_kubernetes(self) -> None:
        self._kubernetes.close()

    def __call__(self, settings: dict[str, Any] | None = None, workloads: bool = True) -> Account:
        """Of Pulumi.dev.yaml as it is, or of a stack file with these settings alone; with an empty Kubernetes and a training job, unless told otherwise."""
        self.stop_kubernetes()
        folder = self.folders.mktemp("account")
        kubeconfig = self._kubernetes.enter_context(running(folder / "kubernetes")) if workloads else None
        account = Account(folder / "home", kubeconfig=kubeconfig)
        if kubeconfig:
            inhabitants = Inhabitants(Kubernetes(kubeconfig), account)
            inhabitants.start()
            self._kubernetes.callback(inhabitants.stop)
        if settings is not None:
            account.write(settings)
        if workloads:
            account.configure({"ray": {"charts": charts(folder / "charts", list(versions.CHARTS))}, "training": TRAINING})
        account.init()
        return account


@pytest.fixture(scope="session")
def new_account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accounts]:
    accounts = Accounts(tmp_path_factory)
    try:
        yield accounts
    finally:
        accounts.stop_kubernetes()
