from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; torch's threads would only fight
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def made_up(folder: Path, documents: int, words: int, length: int) -> Path:
    """Prepared data of a small made-up language, in rows of ``length`` tokens; a tenth of it is held out."""
    from training.prepare import PrepareSettings, prepare

    draw = random.Random(0)
    vocabulary = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne", "su") for b in ("ra", "ti", "von", "dek")]
    for i in range(documents):
        (folder / f"{i}.txt").write_text(" ".join(draw.choices(vocabulary, weights=range(1, 21), k=words)))
    prepare(
        PrepareSettings(sources=(str(folder),), output=str(folder / "prepared"), tokenizer="train:300", sequence_length=length, eval_fraction=0.1),
        say=lambda _: None,
    )
    return folder / "prepared"


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 330 training rows of 32 tokens, and a few held out."""
    return made_up(tmp_path_factory.mktemp("data"), 60, 180, 32)
