from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests import tiers
from tests.training.conftest import made_up

GPUS = 2


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    tiers.mark(items, __file__, "gpus", None if found >= GPUS else f"needs {GPUS} GPUs of one host, and PyTorch sees {found}")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 128 tokens."""
    return made_up(tmp_path_factory.mktemp("data"), 200, 700, 128)
