"""Prompts of rows, in any order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forge_trainer.errors import DataError
from forge_trainer.types import Prompt

from .columns import ToPrompt
from .order import Order
from .rows import Rows


class IndexedPrompts:
    """Rows as prompts; an epoch has every row once."""

    def __init__(self, rows: Rows, to_prompt: ToPrompt, *, seed: int, shuffle: bool) -> None:
        self._rows = rows
        self._to_prompt = to_prompt
        self._seed = seed
        self._shuffle = shuffle

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"seed": self._seed, "shuffle": self._shuffle, "rows": len(self._rows)}

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, index: int) -> Prompt:
        """That of the row at `index`.

        Raises:
            DataError: the row is malformed; the message begins with its place.
        """
        try:
            return self._to_prompt(self._rows.row(index))
        except DataError as error:
            raise DataError(f"{self._rows.where(index)}: {error}") from error

    def open(self, epoch: int) -> IndexedEpoch:
        order = Order(self._rows.layout, seed=self._seed, epoch=epoch) if self._shuffle else None
        return IndexedEpoch(self, order)


class IndexedEpoch:
    """One pass over all rows. Its state is how many it has given."""

    def __init__(self, prompts: IndexedPrompts, order: Order | None) -> None:
        self._prompts = prompts
        self._order = order
        self.position = 0

    def __iter__(self) -> Iterator[tuple[int, Prompt]]:
        return self

    def __next__(self) -> tuple[int, Prompt]:
        if self.position >= len(self._prompts):
            raise StopIteration
        index = self._order.row_at(self.position) if self._order else self.position
        prompt = self._prompts.prompt(index)
        self.position += 1
        return index, prompt

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]
