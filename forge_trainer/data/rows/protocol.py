"""What every kind of rows can do, and what of them is near to what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

BLOCK_ROWS = 2**20
"""Rows of one block where each is read by itself: so many are shuffled at one time, and 8 bytes of
memory taken for each."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rows are read together, so that a shuffled order asks for those at one time."""

    blocks: Sequence[int]
    """Rows of every block, in the order of the rows."""
    held: int = 1
    """Blocks that are in memory at one time."""


def one_by_one(num_rows: int) -> Layout:
    """The layout of rows that are near to each other anywhere."""
    whole, rest = divmod(num_rows, BLOCK_ROWS)
    return Layout([BLOCK_ROWS] * whole + [rest] * bool(rest))


class Rows(Protocol):
    """A fixed number of rows in a fixed order, too many for memory perhaps."""

    @property
    def layout(self) -> Layout: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Any:
        """The row at `index`, counted from 0.

        Raises:
            DataError: it cannot be read; `where` tells which it was.
        """
        ...

    def where(self, index: int) -> str:
        """Where a person finds the row."""
        ...
