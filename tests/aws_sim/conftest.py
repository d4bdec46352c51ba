"""The real Pulumi engine against a simulated AWS account. Skipped where the simulator or the engine is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import versions
from tests.aws_sim.api_server import Inhabitants, Kubernetes, charts, running
from tests.aws_sim.simulated import Account, missing

# Never starts where there are no pods, so its data need not be.
TRAINING = {"run": True, "model": {"random": "tiny"}, "data": "s3://data/prepared", "steps": 20}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.aws_sim)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def new_account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Account]]:
    with contextlib.ExitStack() as before:

        def make(settings: dict[str, Any] | None = None, workloads: bool = True) -> Account:
            """Of Pulumi.dev.yaml as it is, or of a stack file with these settings alone; with an empty Kubernetes and a training job, unless told otherwise.

            The Kubernetes of the account before is stopped.
            """
            before.close()
            folder = tmp_path_factory.mktemp("account")
            kubeconfig = before.enter_context(running(folder / "kubernetes")) if workloads else None
            account = Account(folder / "home", kubeconfig=kubeconfig)
            if kubeconfig:
                inhabitants = Inhabitants(Kubernetes(kubeconfig), account)
                inhabitants.start()
                before.callback(inhabitants.stop)
            if settings is not None:
                account.write(settings)
            if workloads:
                account.configure({"ray": {"charts": charts(folder / "charts", list(versions.CHARTS))}, "training": TRAINING})
            account.init()
            return account

        yield make
