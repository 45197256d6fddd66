"""Calls to the ranks of a trainer take turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from forge_trainer.errors import EngineError
from forge_trainer.tasks import to_the_end

P = ParamSpec("P")
T = TypeVar("T")


class Turns:
    """One call at a time, and none is cut short: a caller that is cancelled waits for its end."""

    def __init__(self, before: Callable[[], Awaitable[None]]) -> None:
        """`before` runs at the start of every turn; if it raises, the call is not made."""
        self._before = before
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def take(
        self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The result of `work`, with no other call in between."""
        async with self._turn():
            await self._before()
            return await to_the_end(work(*args, **kwargs))

    async def take_anyway(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The same without `before`: for what mends the failure that it would raise."""
        async with self._turn():
            return await to_the_end(work())

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        async with self._lock:
            if self._is_closed:
                raise EngineError("this trainer is closed")
            yield

    async def close(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """The last turn, taken once."""
        async with self._lock:
            if not self._is_closed:
                self._is_closed = True
                await to_the_end(work())
