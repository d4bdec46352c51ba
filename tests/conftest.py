from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine (two busy cores), not about the code.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("project")
