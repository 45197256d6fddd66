"""Reporting: one row of numbers per step, to as many sinks as wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from forge_trainer.types import Episode


class Sink(Protocol):
    """A place where rows go."""

    def write_step(self, row: Mapping[str, float], episodes: Sequence[Episode]) -> None: ...

    def write_evaluation(self, row: Mapping[str, float]) -> None:
        """`row["step"]` says which weights were asked."""
        ...

    def close(self) -> None: ...


class Reporter:
    """Hands every row to every sink."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def report_step(self, row: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        for sink in self._sinks:
            sink.write_step(row, episodes)

    def report_evaluation(self, row: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write_evaluation(row)

    def close(self) -> None:
        """Close the sinks, last one first."""
        for sink in reversed(self._sinks):
            sink.close()
