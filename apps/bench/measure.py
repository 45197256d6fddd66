"""Ratios with their spread, from interleaved runs: the machine's mood hits both sides alike."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

Measure = Callable[[], Awaitable[float]]
"""Runs a thing once; the seconds or bytes it took."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A measured number, with how far it varied."""

    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Row:
    """One result of a suite."""

    key: str
    meaning: str
    spread: Spread
    bar: float | None = None
    """What it should not exceed."""


async def interleaved(
    first: Measure, second: Measure, *, rounds: int, warmup: int = 2
) -> list[tuple[float, float]]:
    """Pairs of measurements, taken in turn; the first `warmup` pairs are dropped."""
    pairs = [(await first(), await second()) for _ in range(warmup + rounds)]
    return pairs[warmup:]


def ratios(pairs: Sequence[tuple[float, float]]) -> Spread:
    """first / second of every pair."""
    return Spread.of([first / second for first, second in pairs])
