"""Group advantages: how much better a completion was than the others of its prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_advantages(
    rewards_G: Sequence[float], *, divide_by_std: bool, eps: float = 1e-6
) -> list[float]:
    """Reward minus the mean of its group, divided by the group's standard deviation if asked.

    With the division: Shao et al. (2024), DeepSeekMath, arXiv:2402.03300, section 4.1.2 (the
    population standard deviation). Without: Liu et al. (2025), Dr. GRPO, arXiv:2503.20783.
    A group of equal rewards has advantages 0.

    Example:
        rewards [1, 0, 0, 1], divide_by_std=False -> [.5, -.5, -.5, .5]
        rewards [1, 0, 0, 1], divide_by_std=True  -> [1, -1, -1, 1]
    """
    if not rewards_G:
        raise ValueError("a group needs at least one reward, got none")
    mean = sum(rewards_G) / len(rewards_G)
    centred = [reward - mean for reward in rewards_G]
    if not divide_by_std:
        return centred
    std = math.sqrt(sum(c * c for c in centred) / len(centred))
    return [c / (std + eps) for c in centred]
