"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from training.settings import Settings


def learning_rate(step: int, settings: Settings) -> float:
    """Rate of optimizer step ``step`` (0-based): linear warm-up to the peak, then a cosine down to its ``final_learning_rate`` part."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    span = max(1, settings.steps - 1 - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    floor = settings.final_learning_rate
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
