"""Prompts of a user's own, as a config may name them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from forge_trainer.types import Prompt


def endless(*, seed: int, largest: int = 1000) -> Iterator[Prompt]:
    """Another number for every prompt; its text is one to three characters long."""
    rng = random.Random(seed)
    while True:
        yield Prompt(text=str(rng.randrange(largest)), answer="")


def seven(*, seed: int) -> Iterator[dict[str, Any]]:
    """Seven rows, in an order of the seed's."""
    numbers = list(range(7))
    random.Random(seed).shuffle(numbers)
    for number in numbers:
        yield {"prompt": f"{number}+{number}=", "answer": 2 * number, "id": f"n{number}"}


def listed(*, seed: int) -> list[dict[str, Any]]:
    """The same rows as a list, which is shuffled for it."""
    return sorted(seven(seed=seed), key=lambda row: row["id"])


class Counting:
    """Counts, and knows where it is; made again, it could not find its place by itself."""

    made = 0

    def __init__(self, *, seed: int) -> None:
        self._state = {"next": 100 * seed}
        Counting.made += 1

    def __iter__(self) -> Iterator[Prompt]:
        while True:
            number = self._state["next"]
            self._state["next"] += 1
            yield Prompt(text=str(number), answer=str(number))

    def state_dict(self) -> dict[str, int]:
        return self._state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._state = state
        self._state["resumed"] = self._state.get("resumed", 0) + 1

    def reward(self, completion: str, prompt: Prompt) -> float:
        return 2.0 * (completion == prompt.answer)


def failing(*, seed: int) -> Iterator[Prompt]:
    yield Prompt("one", "1")
    raise KeyError("two")


def shrinking(*, seed: int) -> Iterator[Prompt]:
    """Gives one prompt less every time that it is called."""
    shrinking.left -= 1  # type: ignore[attr-defined]
    for number in range(shrinking.left):  # type: ignore[attr-defined]
        yield Prompt(str(number), "")


def nothing(*, seed: int) -> list[Prompt]:
    return []


def one(*, seed: int) -> Prompt:
    return Prompt("one", "1")


async def asynchronous(*, seed: int) -> Any:
    yield Prompt("one", "1")
