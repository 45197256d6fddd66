"""Ratios with their spread, from interleaved runs: the machine's mood hits both sides alike."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from forge_trainer.types import Episode

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


class StepRows:
    """A sink that keeps the rows of steps."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, float]] = []

    def write_step(self, row: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        self.rows.append(row)

    def write_evaluation(self, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


async def interleaved(*measures: Measure, rounds: int, warmup: int = 2) -> list[tuple[float, ...]]:
    """A number of each measure per round, taken in turn; the first `warmup` rounds are dropped."""
    taken = [tuple([await measure() for measure in measures]) for _ in range(warmup + rounds)]
    return taken[warmup:]


def ratios(rounds: Sequence[tuple[float, ...]]) -> Spread:
    """first / second of every round."""
    return Spread.of([first / second for first, second, *_ in rounds])
