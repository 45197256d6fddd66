"""Metric values that know how to merge, so that ranks and microbatches need no special code.

Mean(6.0, 4) merged with Mean(2.0, 4) is Mean(8.0, 8), whose value is 1.0.
Keys are `area/thing`, such as `trainer/grad_norm`. A loss may fill metrics with tensors,
so that nothing waits for the device inside a step; `as_floats` ends that. No torch here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean: `total` is the sum over `weight` items."""

    total: float
    weight: float

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over everything that was merged."""

    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value that was merged."""

    value: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Last:
    """The value merged last; for facts that are equal everywhere."""

    value: float

    def merge(self, other: Last) -> Last:
        return other


SMALLEST_COUNTED = 1e-7
"""What is smaller counts as 0, see `Quantile`."""
BINS_PER_DECADE = 20
NUM_BINS = 9 * BINS_PER_DECADE + 1
"""The first for what counts as 0, the others up to 100, which also holds what is larger."""


@dataclass(frozen=True, slots=True)
class Quantile:
    """What a share of all merged values does not exceed, from counts in bins of one ratio.

    Bin i > 0 holds values from SMALLEST_COUNTED * 10^((i-1)/BINS_PER_DECADE) up to the same with i.
    The value is the upper edge of the bin that the quantile lies in: never below it, and at most
    12.2% above. Counts add up, so it does not depend on what was merged first, or where.
    """

    counts: Sequence[float]
    """NUM_BINS of them."""
    share: float = 0.99

    @property
    def value(self) -> float:
        below = list(itertools.accumulate(self.counts))
        wanted = self.share * below[-1]
        at = next(i for i, count in enumerate(below) if count >= wanted)
        return SMALLEST_COUNTED * 10 ** (at / BINS_PER_DECADE) if at else 0.0

    def merge(self, other: Quantile) -> Quantile:
        both = zip(self.counts, other.counts, strict=True)
        return Quantile(tuple(a + b for a, b in both), self.share)


@dataclass(frozen=True, slots=True)
class SampleSize:
    """The effective sample size of importance weights w as a share of n, (sum w)^2 / (n sum w^2).

    1 where all weights are equal, 1/n where one of them is all there is. Source: Kong (1992), "A
    note on importance sampling using standardized weights".
    """

    total: float
    squares: float
    count: float

    @property
    def value(self) -> float:
        possible = self.count * self.squares
        return self.total**2 / possible if possible else 0.0

    def merge(self, other: SampleSize) -> SampleSize:
        return SampleSize(
            self.total + other.total, self.squares + other.squares, self.count + other.count
        )


Metric = Mean | Sum | Max | Last | Quantile | SampleSize
Metrics = Mapping[str, Metric]


def as_floats(metrics: Metrics) -> dict[str, Metric]:
    """The same metrics with plain floats in place of tensors.

    Raises:
        TypeError, ValueError, RuntimeError: a tensor holds more than one number, where one belongs.
    """
    return {key: _with_floats(metric) for key, metric in metrics.items()}


def _with_floats(metric: Any) -> Metric:
    if isinstance(metric, Quantile):
        # All at once: a GPU would be asked for each of them otherwise.
        counts: Any = metric.counts
        plain = counts.tolist() if hasattr(counts, "tolist") else counts
        return Quantile(tuple(float(count) for count in plain), metric.share)
    values = (float(getattr(metric, field.name)) for field in dataclasses.fields(metric))
    result: Metric = type(metric)(*values)
    return result


def merge_metrics(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """One mapping from many; a key keeps the merge rule of its metric.

    Raises:
        TypeError: the same key has two different kinds of metric.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for key, metric in part.items():
            merged[key] = _merge_pair(key, merged[key], metric) if key in merged else metric
    return merged


def _merge_pair(key: str, left: Any, right: Any) -> Metric:
    if type(left) is not type(right):
        kinds = f"{type(left).__name__} and {type(right).__name__}"
        raise TypeError(f"metric {key!r} is reported as {kinds}; use one kind")
    result: Metric = left.merge(right)
    return result


def metric_values(metrics: Metrics) -> dict[str, float]:
    """The plain number of every metric."""
    return {key: metric.value for key, metric in metrics.items()}
