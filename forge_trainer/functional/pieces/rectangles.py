"""Rectangles of tensors: what they share, and which one a rank holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from forge_trainer.errors import WeightsError

Rectangle = tuple[Sequence[int], Sequence[int]]
"""Offsets and shape."""


def overlap(
    offsets: Sequence[int],
    shape: Sequence[int],
    other_offsets: Sequence[int],
    other_shape: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(offsets, shape) of what two rectangles of one tensor share; None if that is nothing."""
    starts = tuple(max(a, b) for a, b in zip(offsets, other_offsets, strict=True))
    ends = tuple(
        min(a + a_size, b + b_size)
        for a, a_size, b, b_size in zip(offsets, shape, other_offsets, other_shape, strict=True)
    )
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return starts, tuple(end - start for start, end in zip(starts, ends, strict=True))


def any_overlap(rectangles: Sequence[Rectangle], global_shape: Sequence[int]) -> bool:
    """True if two of them share an element.

    Linear where they are slices of one dim, as of hundreds of ranks they are.
    """
    rectangles = [rectangle for rectangle in rectangles if 0 not in rectangle[1]]
    varying = [
        dim
        for dim, extent in enumerate(global_shape)
        if any(offsets[dim] or shape[dim] != extent for offsets, shape in rectangles)
    ]
    pairs = (
        itertools.combinations(rectangles, 2)
        if len(varying) > 1
        else itertools.pairwise(sorted(rectangles))
    )
    return any(overlap(*one, *other) is not None for one, other in pairs)


def rectangle_offsets(name: str, tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's local tensor begins in the whole one.

    Raises:
        WeightsError: it is a partial sum, or its rows do not follow each other.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    for axis, placement in enumerate(placements):
        if isinstance(placement, Partial):
            raise WeightsError(f"{name} is a partial sum over ranks ({placements})")
        if isinstance(placement, _StridedShard) and mesh.size(axis) > 1:
            later = [
                mesh.size(other)
                for other in range(axis + 1, mesh.ndim)
                if isinstance(placements[other], Shard)
                and getattr(placements[other], "dim", None) == placement.dim
            ]
            if placement.split_factor != math.prod(later):
                raise WeightsError(
                    f"a rank's rows of {name} do not follow each other ({placements})"
                )
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return tuple(int(offset) for offset in offsets)
