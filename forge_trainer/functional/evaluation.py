"""What an evaluation's numbers say: means with confidence intervals, pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, and where it is with 95 % confidence."""

    mean: float
    low: float
    high: float


def mean_interval(
    values_P_N: Sequence[Sequence[float]], *, confidence: float = CONFIDENCE
) -> Interval:
    """The mean over P prompts of the mean over each prompt's N values, with its interval.

    Prompts are independent, answers to one prompt are not, so prompts are what is counted: Miller
    (2024), "Adding Error Bars to Evals", arXiv:2411.00640, section 2.2. Where every prompt has one
    value of 0 or 1, Wilson's score interval, which does not shrink to nothing at 0 or 1: Wilson
    (1927), JASA 22, eq. 4. Otherwise the normal approximation.

    Example:
        [[1], [0], [1], [1]] -> 0.75 in [0.301, 0.954]
    """
    if not values_P_N or not all(values_P_N):
        raise ValueError("an evaluation needs at least one value for every prompt")
    means_P = np.array([sum(values) / len(values) for values in values_P_N], np.float64)
    mean, n = float(means_P.mean()), len(means_P)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    if all(len(values) == 1 and values[0] in (0.0, 1.0) for values in values_P_N):
        return _wilson(mean, n, z)
    # One prompt says nothing about how prompts differ.
    error = float(means_P.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return Interval(mean, mean - z * error, mean + z * error)


def _wilson(mean: float, n: int, z: float) -> Interval:
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return Interval(mean, max(0.0, centre - half), min(1.0, centre + half))


def pass_at_k(num_right_P: Sequence[int], *, n: int, k: int) -> float:
    """The chance that one of k answers to a prompt is right, from n answers to each of P prompts:
    the mean of 1 - C(n - c, k) / C(n, k), where c are right.

    Source: Chen et al. (2021), "Evaluating Large Language Models Trained on Code",
    arXiv:2107.03374, eq. 1.

    Example:
        one prompt, 2 of 4 right, k = 2 -> 1 - C(2, 2) / C(4, 2) = 5/6
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} answers to a prompt, got {n}")
    total = math.comb(n, k)
    return sum(1 - math.comb(n - right, k) / total for right in num_right_P) / len(num_right_P)
