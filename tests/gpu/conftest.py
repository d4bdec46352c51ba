from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests import tiers
from tests.training.conftest import made_up

GPUS = {"test_one_gpu.py": 1, "test_two_gpus.py": 2}


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    for name, needed in GPUS.items():
        of_file = [item for item in items if item.path.name == name]
        tiers.mark(of_file, __file__, "gpus", None if found >= needed else f"needs {needed} of one host's GPUs, and PyTorch sees {found}")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 128 tokens."""
    return made_up(tmp_path_factory.mktemp("data"), 200, 700, 128)
