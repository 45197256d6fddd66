"""What a model acts in."""

from __future__ import annotations

from typing import Protocol

from forge_trainer.types import Message, Opening, Prompt, Reply, StopReason


class Environment(Protocol):
    """One episode's world. An object is used for one episode at a time.

    It knows no tokens, no limits and no other episodes: those are the business of what drives it.
    """

    async def reset(self, task: Prompt, seed: int) -> Opening:
        """Begin an episode of `task`; equal seeds begin alike."""
        ...

    async def step(self, message: Message, stop_reason: StopReason) -> Reply:
        """Answer the model's message."""
        ...

    async def close(self) -> None:
        """The episode is over, however it ended."""
        ...
