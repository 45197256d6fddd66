"""Per-token values: lists and NumPy arrays alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

PerToken = Sequence[int] | Sequence[float] | NDArray[Any] | Tensor
"""One number per token. An array is taken as it is; a list costs an object per token."""


def as_array(values: Any) -> NDArray[Any]:
    """The numbers as an array, without a copy if they are one."""
    if isinstance(values, Tensor):
        on_host = values.detach().cpu()
        # NumPy has no bfloat16.
        return np.asarray(on_host.float() if on_host.is_floating_point() else on_host)
    return np.asarray(values)


class EqualByValue:
    """`==` for a dataclass whose fields may be arrays: equal numbers, whatever holds them."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields)

    __hash__ = None  # type: ignore[assignment]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_equal(left[k], right[k]) for k in left)
    if left is None or right is None or isinstance(left, str):
        return bool(left == right)
    return bool(np.array_equal(as_array(left), as_array(right)))
