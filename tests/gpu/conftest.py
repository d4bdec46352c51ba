from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests import tiers

GPUS = 2


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    found = torch.cuda.device_count()
    tiers.mark(items, __file__, "gpus", None if found >= GPUS else f"needs {GPUS} GPUs of one host, and PyTorch sees {found}")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared data of a small made-up language, in rows of 128 tokens."""
    from training.prepare import PrepareSettings, prepare

    folder = tmp_path_factory.mktemp("data")
    words = random.Random(0)
    vocabulary = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne", "su") for b in ("ra", "ti", "von", "dek")]
    for i in range(200):
        (folder / f"{i}.txt").write_text(" ".join(words.choices(vocabulary, weights=range(1, 21), k=700)))
    prepare(
        PrepareSettings(sources=(str(folder),), output=str(folder / "prepared"), tokenizer="train:300", sequence_length=128, eval_fraction=0.1),
        say=lambda _: None,
    )
    return folder / "prepared"
