"""Tasks with an owner: the first failure ends them all and is what the caller sees."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def first_error() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first error itself instead of a group of one."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def run_with_background(
    main: Coroutine[Any, Any, None], background: Coroutine[Any, Any, None]
) -> None:
    """Run both until `main` is done; an error of either ends both."""
    async with first_error() as group:
        behind = group.create_task(background, name="background")
        await group.create_task(main, name="main")
        behind.cancel()
