"""What failed of a user's own, under its name: counted, told once, and never taken for a 0."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from forge_trainer.tasks import is_cancelled

from .reward_calls import raised

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EpisodeError(Exception):
    """An environment, a reward or a chat template raised, hung, or gave no number."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name} {what}")
        self.name = name
        self.what = what


class Failures:
    """Those of a run."""

    def __init__(self) -> None:
        self._since_last: Counter[str] = Counter()
        self._told: set[str] = set()
        self.last: EpisodeError | None = None

    def count(self, failed: EpisodeError) -> None:
        """One more; the first of its name is told, with where it happened."""
        self.last = failed
        self._since_last[failed.name] += 1
        if failed.name not in self._told:
            self._told.add(failed.name)
            logger.warning("%s; further failures are counted only", failed, exc_info=failed)

    def take(self) -> dict[str, int]:
        """How many of each name there were since the last call."""
        taken, self._since_last = dict(self._since_last), Counter()
        return taken


async def within(seconds: float, ask: Callable[[], Awaitable[T]], *, name: str, verb: str) -> T:
    """What is answered in time.

    Raises:
        EpisodeError: it raised, or took longer.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await ask()
    except (Exception, asyncio.CancelledError) as error:
        # Whoever cancels us is obeyed, whatever was made of it; what cancels itself has failed.
        if is_cancelled():
            raise asyncio.CancelledError from error
        late = limit.expired() and isinstance(error, TimeoutError)
        what = f"took longer than {seconds:g} s" if late else raised(error)
        raise EpisodeError(name, f"{verb} {what}".strip()) from error
