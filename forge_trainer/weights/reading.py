"""Reading a version: everything is fetched and verified before any live tensor is touched."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_trainer.errors import TornWeightsError, WeightsError
from forge_trainer.functional.pieces.manifests import (
    check_fits,
    require_checksums,
    tensors_of,
    ties_of,
)
from forge_trainer.functional.pieces.rectangles import overlap, rectangle_offsets
from forge_trainer.pieces import Manifest, PieceAddress, TensorEntry, dtype_name
from forge_trainer.tasks import to_the_end


class PieceSource(Protocol):
    """How a transport gives the pieces of a version that a reader holds."""

    async def fetch(self, pieces: Sequence[PieceAddress]) -> Sequence[Tensor]:
        """The pieces on the CPU, as their records say, and good as long as the version is held.

        Raises:
            WeightsError: a piece is gone, or has another shape or dtype.
        """
        ...

    def release(self, pieces: Sequence[PieceAddress], fetched: Sequence[Tensor]) -> None:
        """What `fetch` gave for these pieces is not needed any more."""
        ...

    def require_unchanged(self) -> None:
        """Raises WeightsError if what `fetch` gave was overwritten since."""
        ...


@dataclass(frozen=True, slots=True)
class _Copy:
    """What of a piece goes where."""

    piece: PieceAddress
    region: tuple[slice, ...] | None
    """None: all of it."""
    destination: Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """How pieces fill destinations."""

    pieces: list[PieceAddress]
    """Each that is needed, once."""
    sources: list[tuple[int, tuple[slice, ...] | None]]
    """(index of the piece, what of it, None for all)."""
    destinations: list[Tensor]
    """Of every source, where it goes."""
    gpus: set[torch.device]
    """With any of them."""

    @classmethod
    def of(cls, copies: Sequence[_Copy]) -> _Plan:
        pieces: dict[tuple[int, int], tuple[int, PieceAddress]] = {}
        sources = []
        for copy in copies:
            key = (copy.piece.part, copy.piece.index)
            index, _ = pieces.setdefault(key, (len(pieces), copy.piece))
            sources.append((index, copy.region))
        destinations = [copy.destination for copy in copies]
        gpus = {tensor.device for tensor in destinations if tensor.is_cuda}
        return cls([piece for _, piece in pieces.values()], sources, destinations, gpus)


class Plans:
    """The plan of the last pull: of the next one, too, if layout and destinations are the same.

    Making it takes longer than copying where tensors are small. It keeps the destinations alive
    until there is another plan, or the store is closed.
    """

    def __init__(self) -> None:
        self._key: object = None
        self._plan = _Plan.of([])

    def plan(self, manifest: Manifest, destinations: Mapping[str, Tensor], *, whole: bool) -> _Plan:
        """How to fill the destinations; if `whole`, they must be all tensors of the version.

        Raises:
            WeightsError: they do not fit.
        """
        layouts = tuple(part.layout for part in manifest.parts)
        where = tuple((name, *_identity(t)) for name, t in destinations.items())
        key = (whole, layouts, where)
        if key != self._key:
            expected = {n: (tuple(t.shape), dtype_name(t.dtype)) for n, t in destinations.items()}
            check_fits(manifest, expected, whole=whole)
            copies: list[_Copy] = []
            for name, destination in destinations.items():
                copies += _copies(find_entry(manifest, name), destination)
            self._plan, self._key = _Plan.of(copies), key
        return self._plan


class VersionReading:
    """One version that is held until the reader is done; made by `WeightStore.reading`."""

    def __init__(self, manifest: Manifest, source: PieceSource, plans: Plans) -> None:
        self.manifest = manifest
        self._source = source
        self._plans = plans

    @contextlib.asynccontextmanager
    async def arrived(self, destinations: Mapping[str, Tensor]) -> AsyncIterator[ArrivedWeights]:
        """All of the version, fetched and verified beside whatever else runs.

        Inside, `load` fills the destinations, which must be the version's tensors. Until then they
        are untouched.

        Raises:
            WeightsError: names, shapes, dtypes or checksums differ, or a piece is gone.
        """
        plan = self._plans.plan(self.manifest, destinations, whole=True)
        async with self._fetched(plan) as fetched:
            yield ArrivedWeights(self.manifest, self._source, plan, fetched)

    async def load_into(self, destinations: Mapping[str, Tensor]) -> None:
        """Fill a whole model in place; the destinations must be the version's tensors.

        Raises:
            WeightsError: names, shapes, dtypes or checksums differ, or a piece is gone. The
                destinations are untouched.
            TornWeightsError: filling them failed half way.
        """
        await to_the_end(self._fill(self._plans.plan(self.manifest, destinations, whole=True)))

    async def read_into(self, destinations: Mapping[str, Tensor]) -> None:
        """Fill tensors of the version in place; a DTensor gets the shard that is its own.

        Raises: like `load_into`, but for names that are left out.
        """
        await to_the_end(self._fill(self._plans.plan(self.manifest, destinations, whole=False)))

    async def read(
        self, name: str, *, offsets: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """A tensor on the CPU, or the rectangle of it that begins at `offsets`.

        Raises:
            WeightsError: there is no such tensor or rectangle, or a piece of it is damaged.
        """
        entry = find_entry(self.manifest, name)
        offsets = tuple(offsets or (0,) * len(entry.global_shape))
        shape = entry.global_shape if shape is None else tuple(shape)
        rank = len(entry.global_shape)
        if not len(offsets) == len(shape) == rank or any(
            start < 0 or size < 0 or start + size > extent
            for start, size, extent in zip(offsets, shape, entry.global_shape, strict=True)
        ):
            raise WeightsError(
                f"weights {self.manifest.version}: {name} of shape {entry.global_shape} has no "
                f"rectangle of shape {shape} at {offsets}"
            )
        tensor = torch.empty(shape, dtype=entry.pieces[0].record.torch_dtype)
        await to_the_end(self._fill(_Plan.of(_copies_of_region(entry, offsets, tensor))))
        return tensor

    async def _fill(self, plan: _Plan) -> None:
        async with self._fetched(plan) as fetched:
            await ArrivedWeights(self.manifest, self._source, plan, fetched).load()

    @contextlib.asynccontextmanager
    async def _fetched(self, plan: _Plan) -> AsyncIterator[Sequence[Tensor]]:
        """The plan's pieces, verified."""
        fetched = await self._source.fetch(plan.pieces)
        try:
            await asyncio.to_thread(require_checksums, self.manifest, plan.pieces, fetched)
            yield fetched
        finally:
            self._source.release(plan.pieces, fetched)


class ArrivedWeights:
    """What was fetched and verified, on its way to where it is wanted."""

    def __init__(
        self, manifest: Manifest, source: PieceSource, plan: _Plan, fetched: Sequence[Tensor]
    ) -> None:
        self._manifest = manifest
        self._source = source
        self._plan = plan
        self._fetched = fetched

    async def load(self) -> None:
        """Copy it to the destinations.

        Raises:
            WeightsError: what was fetched was overwritten since; the destinations are untouched.
            TornWeightsError: filling them failed half way.
        """
        await asyncio.to_thread(self._copy)

    @torch.no_grad()
    def _copy(self) -> None:
        plan, fetched = self._plan, self._fetched
        if not plan.destinations:
            # An empty shard.
            return
        self._source.require_unchanged()
        try:
            torch._foreach_copy_(
                plan.destinations,
                [
                    fetched[index] if region is None else fetched[index][region]
                    for index, region in plan.sources
                ],
            )
            for gpu in plan.gpus:
                torch.cuda.synchronize(gpu)
            self._source.require_unchanged()
        except Exception as error:
            raise TornWeightsError(
                f"weights {self._manifest.version} were loaded in part only: {error}; pull again "
                "before these tensors are used"
            ) from error


def find_entry(manifest: Manifest, name: str) -> TensorEntry:
    """The tensor of that name; a tied one has several.

    Raises:
        WeightsError: there is none.
    """
    tensors = tensors_of(manifest)
    entry = tensors.get(name) or tensors.get(ties_of(manifest).get(name, name))
    if entry is None:
        raise WeightsError(f"weights {manifest.version} have no tensor {name}")
    return entry


def _identity(tensor: Tensor) -> tuple[object, ...]:
    """What makes the plan for one destination good for another."""
    if isinstance(tensor, DTensor):
        return (tensor._spec, *_identity(tensor._local_tensor))
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _copies(entry: TensorEntry, destination: Tensor) -> list[_Copy]:
    if not isinstance(destination, DTensor):
        return _copies_of_region(entry, (0,) * destination.dim(), destination.detach())
    offsets = rectangle_offsets(entry.name, destination)
    return _copies_of_region(entry, offsets, destination._local_tensor.detach())


def _copies_of_region(
    entry: TensorEntry, offsets: Sequence[int], destination: Tensor
) -> list[_Copy]:
    """The copies that fill `destination`, which lies at `offsets` of the tensor."""
    copies = []
    for piece in entry.pieces:
        record = piece.record
        shared = overlap(record.offsets, record.shape, offsets, destination.shape)
        if shared is None:
            continue
        starts, shape = shared
        source = None if shape == record.shape else _slices(starts, shape, record.offsets)
        copies.append(_Copy(piece, source, destination[_slices(starts, shape, offsets)]))
    return copies


def _slices(
    starts: Sequence[int], shape: Sequence[int], origin: Sequence[int]
) -> tuple[slice, ...]:
    return tuple(
        slice(start - zero, start - zero + size)
        for start, size, zero in zip(starts, shape, origin, strict=True)
    )
