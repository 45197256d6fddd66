"""A call that hangs on all ranks at once: seen by looking at what they do, now and then.

A rank that hangs while others go on is seen without that: it is late, or they lose a collective.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from forge_trainer.errors import WorkerLostError
from forge_trainer.status import RankStatus

LOOKS = 10
"""In the time that a stall may last: for ten minutes, one a minute."""
MAX_NAMED = 8
"""Ranks that an error describes; of the others it tells the number."""

Ask = Callable[[int], Coroutine[Any, Any, RankStatus]]
"""The status of a rank, at once."""


class StallWatch:
    """Of one call, from its beginning on."""

    def __init__(self, method: str, *, num_ranks: int, ask: Ask, limit_s: float) -> None:
        self._method = method
        self._ask = ask
        self._limit_s = limit_s
        began = time.monotonic()
        self._seen_at = [began] * num_ranks
        """When each rank has answered last, or the call began."""
        self._progress_at = [began] * num_ranks
        """When each rank, as far as we know, has done anything last, or the call began."""
        self._last: list[RankStatus | None] = [None] * num_ranks
        """What each rank has said last."""

    async def stalled(self) -> WorkerLostError:
        """What to raise, once no rank has made progress for the limit; until then it waits.

        Asks all ranks for their status, for the first time after a tenth of the limit. Stopped by
        cancelling it.
        """
        while True:
            await asyncio.sleep(self._limit_s / LOOKS)
            await self._look()
            if time.monotonic() - max(self._progress_at) >= self._limit_s:
                return self._error()

    async def _look(self) -> None:
        asking = [
            asyncio.create_task(self._ask(rank), name=f"status[{rank}]")
            for rank in range(len(self._last))
        ]
        try:
            await asyncio.wait(asking, timeout=self._limit_s / LOOKS)
            for rank, task in enumerate(asking):
                # A rank that is gone makes the call itself fail.
                if task.done() and task.exception() is None:
                    self._note(rank, task.result())
        finally:
            for task in asking:
                task.cancel()

    def _note(self, rank: int, status: RankStatus) -> None:
        now = time.monotonic()
        progress_at = now - status.seconds_without_progress
        self._last[rank], self._seen_at[rank] = status, now
        self._progress_at[rank] = max(self._progress_at[rank], progress_at)

    def _error(self) -> WorkerLostError:
        ranks = range(len(self._last))
        seconds = time.monotonic() - max(self._progress_at)
        named = [f"rank {rank}: {self._doing(rank)}" for rank in ranks[:MAX_NAMED]]
        if len(ranks) > MAX_NAMED:
            named.append(f"and {len(ranks) - MAX_NAMED} more")
        silent = [rank for rank in ranks if self._is_silent(rank)]
        steps = {status.step for status in self._last if status is not None}
        return WorkerLostError(
            f"no rank made progress for {seconds:.0f} s: {'; '.join(named)}. If a microbatch may "
            "take so long, raise trainer.stall_timeout_s",
            rank=silent[0] if silent else None,
            phase=self._method,
            step=steps.pop() if len(steps) == 1 else None,
        )

    def _is_silent(self, rank: int) -> bool:
        """A busy host may miss one look, or two."""
        return time.monotonic() - self._seen_at[rank] >= self._limit_s / 2

    def _doing(self, rank: int) -> str:
        now, status = time.monotonic(), self._last[rank]
        if status is None or self._is_silent(rank):
            return f"has not answered for {now - self._seen_at[rank]:.0f} s"
        microbatch = ""
        if status.microbatch:
            microbatch = f", microbatch {status.microbatch} of {status.num_microbatches}"
        return f"{status.phase}{microbatch}, {now - self._progress_at[rank]:.0f} s"
