"""Waiting for a state, with a limit that only a hang reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

A_HANG_S = 120.0
"""Longer than anything takes here, however busy the machine is."""
LOOK_EVERY_S = 0.005


def wait_until(is_true: Callable[[], bool], what: str = "the state waited for") -> None:
    """Return once `is_true()`."""
    end = time.monotonic() + A_HANG_S
    while not is_true():
        assert time.monotonic() < end, f"{what} did not come within {A_HANG_S:.0f} s"
        time.sleep(LOOK_EVERY_S)


async def until(is_true: Callable[[], bool], what: str = "the state waited for") -> None:
    """The same on an event loop."""
    end = time.monotonic() + A_HANG_S
    while not is_true():
        assert time.monotonic() < end, f"{what} did not come within {A_HANG_S:.0f} s"
        await asyncio.sleep(LOOK_EVERY_S)


async def settle(rounds: int = 20) -> None:
    """Let every task that can go on without outside help do so."""
    for _ in range(rounds):
        await asyncio.sleep(0)
