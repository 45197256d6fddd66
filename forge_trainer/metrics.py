"""Metric values that know how to merge, so that ranks and microbatches need no special code.

Mean(6.0, 4) merged with Mean(2.0, 4) is Mean(8.0, 8), whose value is 1.0.
Keys are `area/thing`, such as `trainer/grad_norm`. A loss may fill metrics with 0-dim tensors,
so that nothing waits for the device inside a step; `as_floats` ends that. No torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
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


Metric = Mean | Sum | Max | Last
Metrics = Mapping[str, Metric]


def as_floats(metrics: Metrics) -> dict[str, Metric]:
    """The same metrics with plain floats in place of 0-dim tensors."""
    return {
        key: type(metric)(*(float(getattr(metric, f.name)) for f in dataclasses.fields(metric)))
        for key, metric in metrics.items()
    }


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
