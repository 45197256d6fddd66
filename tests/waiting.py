"""Waiting for a state, with a limit that only a hang reaches."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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


class Gate:
    """Holds up whoever comes by on another thread, until it is opened."""

    def __init__(self) -> None:
        self._reached, self._is_open = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        """Wait until it is open."""
        self._reached.set()
        assert self._is_open.wait(A_HANG_S)

    async def reached(self) -> None:
        """Return once somebody waits at it."""
        assert await asyncio.to_thread(self._reached.wait, A_HANG_S)

    def open(self) -> None:
        self._is_open.set()


@dataclass(frozen=True)
class FileGate:
    """The same between processes: it pickles, and is open once its folder says so."""

    folder: Path

    def pass_through(self) -> None:
        """Wait until it is open."""
        (self.folder / "reached").touch()
        wait_until((self.folder / "open").exists, "an open gate")

    async def reached(self) -> None:
        """Return once somebody waits at it."""
        await until((self.folder / "reached").exists, "somebody at the gate")

    def open(self) -> None:
        (self.folder / "open").touch()
