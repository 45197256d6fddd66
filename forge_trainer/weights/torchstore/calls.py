"""Calls to torchstore: many at once, and their failures as the project's error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

from forge_trainer.errors import WeightsError

MAX_CONCURRENT_CALLS = 4
"""One side packs while the other unpacks; more in flight would only hold more copies."""

T = TypeVar("T")


@contextlib.contextmanager
def store_failures(store_name: str, what: str) -> Iterator[None]:
    """What Monarch and torchstore raise, as the project's error."""
    try:
        yield
    except (WeightsError, asyncio.CancelledError):
        raise
    except Exception as error:
        # torchstore puts whatever fails in locating into the text of a KeyError.
        cause = (isinstance(error, KeyError) and error.__cause__) or error
        # The last line says it; of a missing key that is a list of all keys.
        reason = str(cause).strip().splitlines() or [""]
        raise WeightsError(
            f"{what}: the weight store {store_name!r} failed: {type(cause).__name__}: "
            f"{reason[-1][:200]}; if its process is gone, start a new one "
            "(`Services.restart_store`)"
        ) from error


async def bounded_gather(function: Callable[[Any], Awaitable[T]], items: Sequence[Any]) -> list[T]:
    """The results in order, with at most MAX_CONCURRENT_CALLS running at once."""
    slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def run(item: Any) -> T:
        async with slots:
            return await function(item)

    tasks = [asyncio.ensure_future(run(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        # After a failure, too, nothing goes on behind the caller's back.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
