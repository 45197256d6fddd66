"""What all ranks answer to one call: their results, or the error that explains the others.

One rank's fault looks like many: it dies or fails, and the others lose a collective. The cause is
the error that came first, but for those of broken collectives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from forge_trainer.errors import CollectiveError, ForgeTrainerError, WorkerLostError

from .patience import COMPUTES, Patience

ALIKE_S = 10.0
"""How far apart ranks are, at most, that raise one and the same error."""


Stalled = Callable[[], Coroutine[Any, Any, WorkerLostError]]
"""Waits until no rank has made progress for too long, and says so."""


class Answers:
    """Of one call. `abort` makes a rank that has failed leave its collectives."""

    def __init__(
        self,
        method: str,
        patience: Patience,
        *,
        abort: Callable[[int], Awaitable[None]],
        stalled: Stalled,
    ) -> None:
        self._method = method
        self._patience = patience
        self._waited_s = patience.apart_s
        self._abort = abort
        self._stalled = stalled
        self._failures: list[Exception] = []
        """By arrival."""
        self._is_out_of_step = False

    async def all_of(self, waiting: Sequence[Awaitable[Any]]) -> list[Any]:
        """The results by rank; see `_all_or_cause` for what it waits for.

        Raises:
            ForgeTrainerError: the cause.
        """
        tasks = [
            asyncio.create_task(self._noted(answer), name=f"{self._method}[{rank}]")
            for rank, answer in enumerate(waiting)
        ]
        try:
            return await self._all_or_cause(tasks)
        finally:
            for task in tasks:
                # Asked for, or asyncio would log it as an error that nobody has seen.
                if not task.cancel() and not task.cancelled():
                    task.exception()

    async def _noted(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except Exception as error:
            self._failures.append(error)
            raise

    async def _all_or_cause(self, tasks: list[asyncio.Task[Any]]) -> list[Any]:
        """Waits for the first answer while any rank makes progress: nobody knows how long a step
        takes.

        From then on the others get as long as ranks may be apart; if a collective has broken, that
        time is over already.
        """
        await self._first_answer(tasks)
        if not self._failures and (pending := _pending(tasks)):
            await asyncio.wait(
                pending, timeout=self._patience.apart_s, return_when=asyncio.FIRST_EXCEPTION
            )
        if self._failures and _pending(tasks):
            await self._let_others_explain(tasks)
        if pending := _pending(tasks):
            raise self._without_an_answer_of(tasks.index(next(iter(pending))))
        if self._failures:
            raise first_cause(self._failures)
        return [task.result() for task in tasks]

    async def _first_answer(self, tasks: list[asyncio.Task[Any]]) -> None:
        watch = asyncio.create_task(self._stalled(), name=f"watch {self._method}")
        try:
            await asyncio.wait([*tasks, watch], return_when=asyncio.FIRST_COMPLETED)
            if len(_pending(tasks)) == len(tasks):
                raise watch.result()
        finally:
            watch.cancel()

    async def _let_others_explain(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Nothing comes of this call any more; the others may explain it, or wait in vain."""
        timeout_s = self._patience.apart_s
        if self._method in COMPUTES and not isinstance(self._failures[0], WorkerLostError):
            await asyncio.wait(tasks, timeout=min(ALIKE_S, timeout_s))
            if not _pending(tasks):
                return
            self._is_out_of_step = True
            await self._release(tasks)
        if (
            self._method == "setup"
            or self._is_out_of_step
            or any(isinstance(error, WorkerLostError) for error in self._failures)
        ):
            timeout_s = self._patience.explain_s
        self._waited_s = timeout_s
        await asyncio.wait(tasks, timeout=timeout_s)

    async def _release(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Let ranks that wait in a collective for one that has failed see that it is gone."""
        aborting = [
            asyncio.create_task(self._quietly_abort(rank), name=f"abort[{rank}]")
            for rank, task in enumerate(tasks)
            if task.done() and task.exception() is not None
        ]
        await asyncio.wait(aborting, timeout=self._patience.explain_s)
        for task in aborting:
            task.cancel()

    async def _quietly_abort(self, rank: int) -> None:
        # It may be gone meanwhile; then nothing is left to end.
        with contextlib.suppress(ForgeTrainerError):
            await self._abort(rank)

    def _without_an_answer_of(self, silent: int) -> Exception:
        """Who is silent waits for the one that failed, or hangs itself."""
        own = [error for error in self._failures if not isinstance(error, CollectiveError)]
        is_over = self._method == "setup" or self._is_out_of_step
        if own and (is_over or any(isinstance(error, WorkerLostError) for error in own)):
            return first_cause(self._failures, is_lost=self._is_out_of_step)
        quoted = f"; first error of the others: {self._failures[0]}" if self._failures else ""
        return WorkerLostError(
            f"a rank did not answer within {self._waited_s:.0f} s after another did{quoted}",
            rank=silent,
            phase=self._method,
        )


def _pending(tasks: Sequence[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    return [task for task in tasks if not task.done()]


def first_cause(failures: Sequence[Exception], *, is_lost: bool = False) -> Exception:
    """Of the errors by arrival, the first that is not of a broken collective.

    As a WorkerLostError, if the mesh is lost: some rank is gone, or out of step with the others.
    """
    own = [error for error in failures if not isinstance(error, CollectiveError)]
    first = (own or failures)[0]
    is_lost = is_lost or any(isinstance(error, WorkerLostError) for error in failures)
    if not is_lost or isinstance(first, WorkerLostError):
        return first
    return WorkerLostError(
        f"the mesh is lost: {getattr(first, 'message', first)}",
        rank=getattr(first, "rank", None),
        phase=getattr(first, "phase", None),
        step=getattr(first, "step", None),
    )
