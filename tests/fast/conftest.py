"""Triton's kernels run here on the CPU, by Triton's own interpreter: it must be asked for before the kernels are imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
