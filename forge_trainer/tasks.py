"""Tasks with an owner who sees how they end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


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


@contextlib.asynccontextmanager
async def limit(
    seconds: float, error: Callable[[str], Exception], failure: str
) -> AsyncIterator[None]:
    """Raises `error`, which says what did not happen in time, once the time is over."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as timeout:
        raise error(f"{failure} within {seconds:.0f} s") from timeout


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is never cut short.

    A caller that is cancelled sees its cancellation once the work has ended. Otherwise ranks
    would finish what the controller believes was never done.
    """
    task = asyncio.create_task(work, name=getattr(work, "__name__", None))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("a cancelled call failed: %s: %s", type(error).__name__, error)
        raise


def is_cancelled() -> bool:
    """Whether somebody else cancels this task, rather than what it awaits itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def left_behind(wait: Callable[[], T]) -> T:
    """What `wait` returns, which blocks on a thread of its own.

    A caller that is cancelled leaves the thread behind, as does the end of the process; those of
    `asyncio.to_thread` would be waited for.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(wait())
        except BaseException as error:
            done.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="left_behind", daemon=True).start()
    return await asyncio.wrap_future(done)
