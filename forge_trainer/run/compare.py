"""Which tensors two holders of weights do not have alike.

Checksums are compared first; values are read only of tensors whose checksums differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forge_trainer.errors import WeightsError
from forge_trainer.functional.pieces.differences import ValueDifference, difference
from forge_trainer.functional.pieces.manifests import describe_tensor
from forge_trainer.pieces import TensorFacts

FIRST = 10
"""Differing tensors whose values are read."""


class WeightSource(Protocol):
    """Somebody who has a model's weights."""

    @property
    def label(self) -> str:
        """What it is called in a comparison."""
        ...

    async def checksums(self) -> Mapping[str, TensorFacts]:
        """All tensors; a tied one under one of its names."""
        ...

    async def read(self, name: str) -> Tensor:
        """A tensor on the CPU, by any of its names."""
        ...


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that is not the same on both sides."""

    name: str
    reference: TensorFacts | None
    """None: only the other one has it."""
    other: TensorFacts | None
    """None: only the reference has it."""
    values: ValueDifference | None = None
    """Where shape and dtype are the same; of the first few only."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One source against the reference."""

    reference: str
    other: str
    num_tensors: int
    """That either of them has."""
    differences: tuple[TensorDifference, ...]
    """In the order of names, layer 2 before layer 10."""

    def explain(self, one: TensorDifference) -> str:
        """What is different about it, e.g. "1 of 64 elements, at most by 0.5"."""
        if one.reference is None:
            return f"only in {self.other}"
        if one.other is None:
            return f"only in {self.reference}"
        if one.reference.shape != one.other.shape:
            return self._both("shape", one.reference.shape, one.other.shape)
        if one.reference.dtype != one.other.dtype:
            return self._both("dtype", one.reference.dtype, one.other.dtype)
        if one.values is None:
            return "other values"
        counts = f"{one.values.num_different} of {one.values.num_elements} elements"
        return f"{counts}, at most by {one.values.largest:.3g}"

    def _both(self, what: str, reference: object, other: object) -> str:
        return f"{what} {reference} in {self.reference}, {other} in {self.other}"


async def compare_weights(
    reference: WeightSource, others: Sequence[WeightSource], *, first: int = FIRST
) -> list[Comparison]:
    """Every other source against the reference; values of the `first` differing tensors of each.

    Raises:
        WeightsError: a tensor changed between its checksum and its reading, or cannot be read.
    """
    facts = await reference.checksums()
    return [await _compare(reference, facts, other, first) for other in others]


async def _compare(
    reference: WeightSource, facts: Mapping[str, TensorFacts], other: WeightSource, first: int
) -> Comparison:
    pairs = _pairs(facts, await other.checksums())
    differences: list[TensorDifference] = []
    for name, one, two in pairs:
        values = None
        if one is not None and two is not None and _kind(one) == _kind(two):
            if one.checksum == two.checksum:
                continue
            if len(differences) < first:
                tensors = await _read(reference, name, one), await _read(other, name, two)
                values = await asyncio.to_thread(difference, *tensors)
        differences.append(TensorDifference(name, one, two, values))
    return Comparison(reference.label, other.label, len(pairs), tuple(differences))


def _kind(facts: TensorFacts) -> tuple[tuple[int, ...], str]:
    return facts.shape, facts.dtype


def _pairs(
    one: Mapping[str, TensorFacts], other: Mapping[str, TensorFacts]
) -> list[tuple[str, TensorFacts | None, TensorFacts | None]]:
    """Which tensor of the one is which of the other, under the one's name if both know it.

    Tensors that have a name in common are a pair, so that one side may know a tied tensor by fewer
    names than the other.
    """
    firsts, other_firsts = _first_names(one), _first_names(other)
    shared: dict[tuple[str | None, str | None], str] = {}
    both = firsts.keys() & other_firsts.keys()
    for name in sorted(both, key=lambda name: (name not in one, _in_order(name))):
        shared.setdefault((firsts[name], other_firsts[name]), name)
    paired, other_paired = {left for left, _ in shared}, {right for _, right in shared}
    shared |= {(name, None): name for name in one if name not in paired}
    shared |= {(None, name): name for name in other if name not in other_paired}
    return [
        (name, one[left] if left else None, other[right] if right else None)
        for (left, right), name in sorted(shared.items(), key=lambda item: _in_order(item[1]))
    ]


def _first_names(tensors: Mapping[str, TensorFacts]) -> dict[str, str]:
    """Every name of every tensor, and the one that it goes by."""
    return {name: first for first, facts in tensors.items() for name in (first, *facts.tied)}


def _in_order(name: str) -> list[str]:
    """A key to sort by: numbers by what they count."""
    return [part.zfill(8) if part.isdigit() else part for part in name.split(".")]


async def _read(source: WeightSource, name: str, facts: TensorFacts) -> Tensor:
    tensor = await source.read(name)
    found = await asyncio.to_thread(describe_tensor, tensor, facts.tied)
    if found != facts:
        raise WeightsError(
            f"{source.label}: {name} changed while it was compared; let nothing push or pull "
            "meanwhile"
        )
    return tensor
