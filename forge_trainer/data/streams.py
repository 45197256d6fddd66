"""Prompts that come one after another and cannot be asked for by number."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from forge_trainer.errors import DataError, ForgeTrainerError
from forge_trainer.types import Prompt

from .columns import ToPrompt


class StreamedPrompts:
    """What `make(seed)` iterates over; epoch e is made with `seed + e`."""

    def __init__(
        self, make: Callable[[int], Iterable[Any]], to_prompt: ToPrompt, *, name: str, seed: int
    ) -> None:
        self._make = make
        self._to_prompt = to_prompt
        self._name = name
        self._seed = seed

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"seed": self._seed}

    def open(self, epoch: int) -> StreamedEpoch:
        return StreamedEpoch(self._make(self._seed + epoch), self._to_prompt, self._name)


class StreamedEpoch:
    """One pass. An object with `state_dict` and `load_state_dict` goes on by itself; of all others
    as many items as were given are made again and thrown away."""

    def __init__(self, items: Iterable[Any], to_prompt: ToPrompt, name: str) -> None:
        self._items = items
        self._iterator: Iterator[Any] | None = None
        self._to_prompt = to_prompt
        self._name = name
        self.position = 0

    def __iter__(self) -> Iterator[tuple[int, Prompt]]:
        return self

    def __next__(self) -> tuple[int, Prompt]:
        item = self._next_item()
        index = self.position
        self.position += 1
        try:
            return index, self._to_prompt(item)
        except DataError as error:
            raise DataError(f"{self._name}, item {index}: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"position": self.position}
        if self._keeps_its_state:
            # A copy: what it returns may be what it goes on to change.
            state["own"] = copy.deepcopy(self._items.state_dict())  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state` was taken; only before the first item."""
        if self._keeps_its_state and "own" in state:
            self._items.load_state_dict(copy.deepcopy(state["own"]))  # type: ignore[attr-defined]
            self.position = state["position"]
            return
        for self.position in range(state["position"]):
            try:
                self._next_item()
            except StopIteration:
                raise DataError(
                    f"{self._name} gave {state['position']} items when its state was saved, and "
                    f"now ends after {self.position}; the same seed must give the same items"
                ) from None
        self.position = state["position"]

    @property
    def _keeps_its_state(self) -> bool:
        return hasattr(self._items, "state_dict") and hasattr(self._items, "load_state_dict")

    def _next_item(self) -> Any:
        try:
            if self._iterator is None:
                self._iterator = iter(self._items)
            return next(self._iterator)
        except (StopIteration, ForgeTrainerError):
            raise
        except Exception as error:
            kind = type(error).__name__
            raise DataError(f"{self._name} failed at item {self.position}: {kind}: {error}") from (
                error
            )
