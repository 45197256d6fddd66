"""The one thread of a backend, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """Who holds `turn` has the backend for itself between two of its steps."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generator")
        self.turn = asyncio.Lock()
        self.phase = "starting"
        """`idle`, or what is being done."""

    async def run(self, phase: str, work: Callable[[], T]) -> T:
        """The result of `work` on the thread."""
        self.phase = phase
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self.phase = "idle"

    def close(self) -> None:
        """Wait for what runs."""
        self._thread.shutdown(wait=True)
