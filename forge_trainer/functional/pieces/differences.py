"""How far apart two tensors are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""Compared at one time, in float64."""


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """Between two tensors of one shape and dtype."""

    num_elements: int
    num_different: int
    """Elements whose bytes differ; so do 0.0 and -0.0."""
    largest: float
    """Largest absolute difference; nan where a value is not a number."""


def difference(one: Tensor, other: Tensor) -> ValueDifference:
    """How many elements differ, and by how much.

    Example:
        [1.0, 2.0, 3.0] and [1.0, 2.5, 3.0] -> 1 of 3, at most by 0.5
    """
    num_different, largest = 0, torch.zeros((), dtype=torch.float64)
    for a, b in zip(_chunks(one), _chunks(other), strict=True):
        differs = (_bytes(a) != _bytes(b)).any(dim=1)
        num_different += int(differs.sum())
        if differs.any():
            apart = (_exact(a[differs]) - _exact(b[differs])).abs().max().double()
            # Unlike Python's max, keeps a nan on either side.
            largest = torch.maximum(largest, apart)
    return ValueDifference(one.numel(), num_different, float(largest))


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.detach().contiguous().reshape(-1), CHUNK_ELEMENTS)


def _exact(flat: Tensor) -> Tensor:
    """In a dtype that holds the values and, but for huge integers, their differences."""
    if flat.is_complex():
        return flat.to(torch.complex128)
    return flat.double() if flat.is_floating_point() else flat.long()


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())
