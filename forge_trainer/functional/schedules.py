"""Learning-rate schedule: linear warm-up, stable, decay."""

from __future__ import annotations

import math
from typing import Literal


def warmup_stable_decay(
    step: int,
    *,
    warmup_steps: int,
    decay_steps: int,
    total_steps: int,
    decay_type: Literal["linear", "sqrt", "cosine"],
    min_lr_factor: float,
) -> float:
    """The factor on the learning rate of the update after `step` completed ones.

    Warm-up rises linearly to 1 in `warmup_steps` updates; the last `decay_steps` of
    `total_steps` updates fall towards `min_lr_factor`, and it stays there.
    Source: Hu et al. (2024), MiniCPM, arXiv:2404.06395, section 4; the shape is TorchTitan's.

    Example: warmup 2, decay 2 of 6, linear -> 0.5, 1, 1, 1, 1, 0.5
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_start = total_steps - decay_steps + 1
    if decay_steps == 0 or step < decay_start:
        return 1.0
    progress = min((step + 1 - decay_start) / decay_steps, 1.0)
    shape = {
        "linear": 1.0 - progress,
        "sqrt": 1.0 - math.sqrt(progress),
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[decay_type]
    return min_lr_factor + (1.0 - min_lr_factor) * shape
