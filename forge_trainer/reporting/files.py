"""Files of a run: trainer.json, metrics.jsonl, rollouts.jsonl and TensorBoard events."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from forge_trainer.status import TrainerFacts
from forge_trainer.types import Episode, Message


def write_facts(facts: TrainerFacts, path: Path) -> None:
    """What a run was made of, for whoever reads its numbers later."""
    path.write_text(json.dumps(dataclasses.asdict(facts), indent=2) + "\n")


class MetricsFile:
    """One JSON object a step, and one per evaluation in a file of its own, made when there is one.
    Numbers that are not finite are written as null."""

    def __init__(self, path: Path, evaluations: Path) -> None:
        self._file = path.open("a")
        self._evaluations = evaluations

    def write_step(self, row: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        _write_line(self._file, _finite(row))

    def write_evaluation(self, row: Mapping[str, float]) -> None:
        with self._evaluations.open("a") as file:
            _write_line(file, _finite(row))

    def close(self) -> None:
        self._file.close()


def _finite(row: Mapping[str, float]) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in row.items()}


class RolloutsFile:
    """One JSON object per episode, for the first `per_step` episodes of every step."""

    def __init__(self, path: Path, *, per_step: int) -> None:
        self._file = path.open("a")
        self._per_step = per_step

    def write_step(self, row: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        for episode in episodes[: self._per_step]:
            _write_line(
                self._file,
                {
                    "step": row["step"],
                    "prompt": episode.prompt.text,
                    "completion": episode.text,
                    "answer": episode.prompt.answer,
                    "reward": episode.reward if math.isfinite(episode.reward) else None,
                    "rewards": dict(episode.rewards),
                    "status": episode.status,
                    "turns": episode.num_turns,
                    "messages": [_message(message) for message in episode.messages],
                    "policy_version": episode.policy_version if episode.transcripts else None,
                },
            )

    def write_evaluation(self, row: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Every number as a scalar."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write_step(self, row: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        for key, value in row.items():
            self._writer.add_scalar(key, value, int(row["step"]))

    def write_evaluation(self, row: Mapping[str, float]) -> None:
        self.write_step(row, ())

    def close(self) -> None:
        self._writer.close()


def _message(message: Message) -> dict[str, object]:
    """What there is of it."""
    values = dataclasses.asdict(message)
    return {key: value for key, value in values.items() if value or key == "content"}


def _write_line(file: IO[str], values: Mapping[str, object]) -> None:
    # Flushed line by line, so that a killed run has all its finished steps on disk.
    file.write(json.dumps(values) + "\n")
    file.flush()
