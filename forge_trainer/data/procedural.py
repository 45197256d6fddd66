"""Tasks that make their prompts: the larger of two digits, and the data sets of reasoning-gym."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from forge_trainer.errors import ConfigError, DataError
from forge_trainer.types import Prompt, RewardFn

from .rows import Layout, one_by_one

REASONING_GYM_SIZE = 1_000_000
"""Prompts of a reasoning-gym data set before it starts again; each is made when asked for."""


def larger_digit(seed: int) -> Iterator[Prompt]:
    """`3,7:` -> `7`. The best constant answer, 9, is right in 19 of 100 prompts."""
    rng = random.Random(seed)
    while True:
        a, b = rng.randrange(10), rng.randrange(10)
        yield Prompt(text=f"{a},{b}:", answer=str(max(a, b)), task="larger_digit")


class ReasoningGymRows:
    """Entries of a reasoning-gym data set, and its own way to score answers."""

    def __init__(self, name: str, options: Mapping[str, Any], *, seed: int) -> None:
        """Make the data set and try its first entry.

        Raises:
            ConfigError: reasoning_gym has none of this name, or refuses the options.
        """
        import reasoning_gym

        self._name = name
        try:
            self._dataset = reasoning_gym.create_dataset(
                name, seed=seed, **{"size": REASONING_GYM_SIZE, **options}
            )
            self._dataset[0]
        except Exception as error:
            raise ConfigError(
                f"task: reasoning_gym cannot make {name!r} with {dict(options)}: {error}"
            ) from error

    @property
    def layout(self) -> Layout:
        return one_by_one(len(self))

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> Prompt:
        try:
            entry = self._dataset[index]
        except Exception as error:
            raise DataError(f"it cannot be made: {type(error).__name__}: {error}") from error
        return Prompt(
            text=entry["question"],
            answer=str(entry["answer"]),
            task=self._name,
            metadata=entry["metadata"],
        )

    def where(self, index: int) -> str:
        return f"reasoning_gym/{self._name}, entry {index}"

    @property
    def reward(self) -> RewardFn:
        return _scored_by(self._dataset.score_answer)


def _scored_by(score_answer: Callable[..., float]) -> RewardFn:
    def reward(completion: str, prompt: Prompt) -> float:
        entry = {"question": prompt.text, "answer": prompt.answer, "metadata": prompt.metadata}
        return float(score_answer(completion.strip(), entry))

    return reward
