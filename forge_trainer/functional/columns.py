"""Per-token values of many sequences end to end, in one block of memory.

One block, since it travels to a rank as it is: a single copy joins it, another sends it. What
cannot be joined raises ValueError or TypeError at once and cheaply;
`forge_trainer.functional.validation` then finds the sequence and the words for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_trainer.types.arrays import as_array

LARGEST_ID = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Arrays of one length by name."""

    length: int
    dtypes: Mapping[str, str]
    """In the order in which they lie in `data`, the widest first."""
    data: bytearray

    @classmethod
    def empty(cls, length: int, dtypes: Mapping[str, Any]) -> Columns:
        """Zeros."""
        wide = sorted(dtypes, key=lambda name: -np.dtype(dtypes[name]).itemsize)
        ordered = {name: np.dtype(dtypes[name]).str for name in wide}
        size = sum(np.dtype(dtype).itemsize for dtype in ordered.values())
        return cls(length, ordered, bytearray(length * size))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Views of the data."""
        views, offset = {}, 0
        for name, dtype in self.dtypes.items():
            # An empty column may begin where the data ends, which frombuffer refuses.
            data = self.data if self.length else bytearray(8)
            views[name] = np.frombuffer(data, dtype, self.length, offset if self.length else 0)
            offset += views[name].nbytes
        return views


def join(out: NDArray[Any], values: Sequence[Any]) -> None:
    """Write the values end to end to `out`: int32 takes token ids, bool a mask, others numbers."""
    arrays = [as_array(one) for one in values]
    if any(array.dtype.kind not in "biuf" or array.ndim != 1 for array in arrays):
        raise ValueError("not flat lists of numbers")
    if not arrays:
        return
    if out.dtype == np.int32:
        _require_ids(arrays)
    elif out.dtype == np.bool_:
        _require_zeros_and_ones(arrays)
    with np.errstate(over="ignore", invalid="ignore"):
        np.concatenate(arrays, out=out, casting="unsafe")
        # A sum of finite numbers may overflow, but one with a nan or infinity is not finite.
        if out.dtype.kind == "f" and not (np.isfinite(out.sum()) or np.isfinite(out).all()):
            raise ValueError("not finite")


def _require_ids(arrays: Sequence[NDArray[Any]]) -> None:
    for array in arrays:
        if array.dtype.kind not in "iu":
            raise ValueError("token ids must be integers")
        if (
            array.dtype != np.int32
            and array.size
            and not 0 <= array.min() <= array.max() <= (LARGEST_ID)
        ):
            raise ValueError("token ids must be from 0 on, and 32-bit numbers")


def _require_zeros_and_ones(arrays: Sequence[NDArray[Any]]) -> None:
    for array in arrays:
        if array.dtype != np.bool_ and not ((array == 0) | (array == 1)).all():
            raise ValueError("a mask holds 0 and 1")


def whole_or_float(values: Sequence[Any]) -> type[np.int64 | np.float32]:
    """int64 for columns of integers and booleans alone, else float32."""
    is_whole = all(as_array(one).dtype.kind in "biu" for one in values)
    return np.int64 if is_whole else np.float32
