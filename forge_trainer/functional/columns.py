"""Per-token values of many sequences end to end, as arrays of one dtype.

What cannot be joined raises ValueError or TypeError at once and cheaply;
`forge_trainer.functional.validation` then finds the sequence and the words for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_trainer.types.arrays import as_array

LARGEST_ID = np.iinfo(np.int32).max


def join_ids(values: Sequence[Any]) -> NDArray[np.int32]:
    """Token ids, int32."""
    arrays = [as_array(one) for one in values]
    if any(array.dtype.kind not in "iu" for array in arrays):
        raise ValueError("token ids must be integers")
    if all(array.dtype == np.int32 for array in arrays):
        return _flat(arrays, np.int32)
    ids = _flat(arrays, np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() <= LARGEST_ID:
        raise ValueError("token ids must be from 0 on, and 32-bit numbers")
    return ids.astype(np.int32)


def join_mask(values: Sequence[Any]) -> NDArray[np.bool_]:
    """Zeros and ones, bool."""
    arrays = [as_array(one) for one in values]
    mask = _flat(arrays, None if arrays else np.bool_)
    if mask.dtype.kind not in "biuf" or not ((mask == 0) | (mask == 1)).all():
        raise ValueError("a mask holds 0 and 1")
    return mask.astype(np.bool_, copy=False)


def join_numbers(values: Sequence[Any], dtype: Any = np.float32) -> NDArray[Any]:
    """Numbers that are finite in `dtype`."""
    arrays = [as_array(one) for one in values]
    if any(array.dtype.kind not in "biuf" for array in arrays):
        raise ValueError("not numbers")
    with np.errstate(over="ignore"):
        joined = _flat(arrays, dtype)
    if joined.dtype.kind == "f" and not np.isfinite(joined).all():
        raise ValueError("not finite")
    return joined


def whole_or_float(values: Sequence[Any]) -> type[np.int64 | np.float32]:
    """int64 for columns of integers and booleans alone, else float32."""
    is_whole = all(as_array(one).dtype.kind in "biu" for one in values)
    return np.int64 if is_whole else np.float32


def _flat(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    if not arrays:
        return np.empty(0, dtype)
    joined = np.concatenate(arrays, dtype=dtype, casting="unsafe")
    if joined.ndim != 1:
        raise ValueError("not flat")
    return joined
