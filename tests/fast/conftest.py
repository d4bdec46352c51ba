"""Where there is no GPU, Triton's own interpreter runs the kernels on the CPU: it must be asked for before the kernels are imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
