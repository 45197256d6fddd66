"""A source of prompts: in a seeded order, as long as they are wanted, resumable at any item."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

from forge_trainer.config import OnLongPrompt
from forge_trainer.errors import ConfigError, DataError
from forge_trainer.metrics import Last, Metric
from forge_trainer.types import Prompt, PromptKey

from .fitting import PromptLimit

MAX_DROPPED_IN_A_ROW = 100_000


class Epoch(Protocol):
    """One pass over data."""

    position: int
    """Prompts that it has given, those before a resumption included."""

    def __next__(self) -> tuple[int, Prompt]:
        """The next prompt and its index; StopIteration at the end."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where the state was taken; only before the first prompt."""
        ...


class PromptData(Protocol):
    """Where a source reads from."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """What must be as it was for a saved position to mean the same prompts."""
        ...

    def open(self, epoch: int) -> Epoch:
        """The pass after `epoch` others, from its beginning."""
        ...


class PromptSource:
    """An iterator over prompts, each with its key.

    Ends after `epochs` passes; without them never. Its state is taken between two prompts, and a
    source of the same data that loads it gives the same prompts from there on. Reading a row may
    touch the disk; a loop that must not wait calls `next` on a thread, one at a time.
    """

    def __init__(
        self,
        data: PromptData,
        *,
        epochs: int | None = None,
        on_long_prompt: OnLongPrompt = "drop",
        limit: PromptLimit | None = None,
    ) -> None:
        self._data = data
        self._epochs = epochs
        self.on_long_prompt = on_long_prompt
        self._limit = limit
        self._epoch = 0
        self._pass: Epoch | None = None
        self._kept_in_epoch = 0
        self.num_dropped = 0
        """Prompts that were too long, so far."""
        self.num_truncated = 0
        """Prompts that were cut, so far."""

    def with_limit(self, limit: PromptLimit) -> PromptSource:
        """The same source from its beginning, all of whose prompts fit."""
        policy = self.on_long_prompt
        return PromptSource(self._data, epochs=self._epochs, on_long_prompt=policy, limit=limit)

    def peek(self, num_prompts: int) -> list[Prompt]:
        """The first prompts of the source, or all if it has fewer, of any length.

        They are read beside it: wherever this one is, there it stays.
        """
        return list(itertools.islice(PromptSource(self._data, epochs=1), num_prompts))

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        """The next prompt that fits.

        Raises:
            StopIteration: all epochs are over.
            DataError: a prompt is malformed, none fits, or one does not where it must.
        """
        for _ in range(MAX_DROPPED_IN_A_ROW):
            prompt = self._read()
            fitting = prompt if self._limit is None else self._limit.fit(prompt)
            if fitting is not None:
                self.num_truncated += fitting is not prompt
                self._kept_in_epoch += 1
                return fitting
            self.num_dropped += 1
        raise DataError(f"the last {MAX_DROPPED_IN_A_ROW:,} prompts were all too long; {_REMEDY}")

    def _read(self) -> Prompt:
        while self._epochs is None or self._epoch < self._epochs:
            self._pass = self._pass or self._data.open(self._epoch)
            try:
                index, prompt = next(self._pass)
            except StopIteration:
                self._finish_epoch(self._pass.position)
                continue
            key = PromptKey(self._epoch, index, prompt.key.id or str(index))
            return replace(prompt, key=key)
        raise StopIteration

    def _finish_epoch(self, num_prompts: int) -> None:
        if not num_prompts:
            raise DataError(f"the task gives no prompt in epoch {self._epoch}; give it some")
        if not self._kept_in_epoch:
            raise DataError(f"all {num_prompts} prompts of an epoch were too long; {_REMEDY}")
        self._epoch += 1
        self._pass = None
        self._kept_in_epoch = 0

    def metrics(self) -> dict[str, Metric]:
        """How far it is, and what did not fit so far."""
        return {
            "prompts/epoch": Last(self._epoch),
            "prompts/dropped": Last(self.num_dropped),
            "prompts/truncated": Last(self.num_truncated),
        }

    def state_dict(self) -> dict[str, Any]:
        """Where it is; plain values, but for what a user's own object keeps."""
        return {
            "data": dict(self._data.facts),
            "epoch": self._epoch,
            "pass": None if self._pass is None else self._pass.state_dict(),
            "kept_in_epoch": self._kept_in_epoch,
            "num_dropped": self.num_dropped,
            "num_truncated": self.num_truncated,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where the state was taken.

        Raises:
            ConfigError: it is of other data, or of another order.
            DataError: a generator function does not give again what it gave.
        """
        facts = dict(self._data.facts)
        if state["data"] != facts:
            raise ConfigError(
                f"task: the saved place is one in {state['data']}, and the data is {facts} now; "
                "give the same data, seed and task.shuffle"
            )
        self._epoch = state["epoch"]
        self._pass = None
        if state["pass"] is not None:
            self._pass = self._data.open(self._epoch)
            self._pass.load_state_dict(state["pass"])
        self._kept_in_epoch = state["kept_in_epoch"]
        self.num_dropped = state["num_dropped"]
        self.num_truncated = state["num_truncated"]


_REMEDY = "raise generator.max_prompt_tokens, or let task.on_long_prompt be truncate_left"
