"""In which order an epoch takes rows."""

from __future__ import annotations

import itertools
from bisect import bisect_right

import numpy as np

from .rows import Layout


class Order:
    """Every row once, in an order that follows from seed, epoch and layout.

    Where all blocks can be held, any order is as likely as any other. Where not, blocks come in any
    order, and as many as can be held are shuffled into each other: 6 blocks of which 2 are held
    become 3 windows.
    """

    def __init__(self, layout: Layout, *, seed: int, epoch: int) -> None:
        # NumPy promises that the numbers of RandomState stay as they are in all its versions, so
        # that a run goes on in its own order.
        self._seed = (seed & 0xFFFFFFFF, seed >> 32, epoch)
        blocks = self._random(0).permutation(len(layout.blocks))
        starts = np.cumsum([0, *layout.blocks])
        windows = [blocks[i : i + layout.held] for i in range(0, len(blocks), layout.held)]
        self._windows = [[(starts[b], starts[b + 1]) for b in window] for window in windows]
        sizes = [sum(int(end - start) for start, end in window) for window in self._windows]
        self._ends = list(itertools.accumulate(sizes))
        self._current: tuple[int, np.ndarray] = -1, np.zeros(0, np.int64)

    def row_at(self, position: int) -> int:
        """The row that comes after `position` others."""
        number = bisect_right(self._ends, position)
        if number != self._current[0]:
            rows = np.concatenate([np.arange(*block) for block in self._windows[number]])
            self._current = number, self._random(number + 1).permutation(rows)
        return int(self._current[1][position - self._ends[number]])

    def _random(self, use: int) -> np.random.RandomState:
        return np.random.RandomState((*self._seed, use))
