"""What is set for PyTorch's allocator before it holds anything."""

from __future__ import annotations

import os

import pytest

from training.world import prepare_allocator


@pytest.mark.parametrize("said", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_gpu_memory_grows_piece_by_piece_unless_the_environment_says_anything_of_it(monkeypatch: pytest.MonkeyPatch, said: str | None) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.setenv(name, "")  # what the test leaves is then taken back
        monkeypatch.delenv(name)
    if said is not None:
        monkeypatch.setenv(said, "max_split_size_mb:512")
    prepare_allocator()
    expected = {said: "max_split_size_mb:512"} if said is not None else {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert {name: os.environ[name] for name in names if name in os.environ} == expected
