from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Where there is no GPU, Triton's own interpreter runs the kernels. It reads this when it is first imported, in children as well.
if not Path("/dev/nvidia0").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# How long an example takes says something about the machine (two busy cores), not about the code.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")
