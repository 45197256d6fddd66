"""Calls to the volumes of a torchstore and to its index, a call for many pieces.

The endpoints are those that `forge_trainer.processes.torchstore_batches` adds. Pieces travel by
torchstore's own transport: RPC, or RDMA where it finds that.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from forge_trainer.functional.pieces.manifests import tensors_of
from forge_trainer.pieces import Manifest, RankPieces
from forge_trainer.weights.keys import tensor_key


class Volumes:
    """Where pieces lie, seen by a torchstore client."""

    def __init__(self, client: Any) -> None:
        self._strategy = client.strategy
        self._index = client._controller

    @property
    def own(self) -> str:
        """The volume that this process writes to."""
        return str(self._strategy.select_storage_volume()[1])

    def _volume(self, name: str) -> Any:
        return self._strategy.get_storage_volume(name)

    async def write(
        self, location: str, numbers: Tensor, shapes: Mapping[int, Sequence[int]]
    ) -> None:
        """Bring pieces that lie side by side to this process's volume.

        Args:
            shapes: index of a piece -> its shape, in the order in which they lie.
        """
        volume = self._volume(self.own)
        async with _transport_buffer(volume, numbers) as buffer:
            await buffer.write_from(numbers)
            await volume.write_pieces.call_one(location, buffer, dict(shapes))

    async def read(self, place: str, indices: Sequence[int], like: Tensor) -> Tensor:
        """Pieces of one location, side by side.

        Args:
            place: a volume and a location, see `place_of`.
            like: as many numbers of the same dtype.
        """
        location, _, name = place.rpartition("@")
        volume = self._volume(name)
        meta = (tuple(like.shape), like.dtype)
        async with _transport_buffer(volume, meta) as buffer:
            buffer.update(await volume.read_pieces.call_one(location, indices, buffer))
            numbers: Tensor = await buffer.read_into(None)
        return numbers

    async def publish(self, manifest: Manifest) -> None:
        """Put all tensors of the version under their keys; each appears at once and whole."""
        by_volume: dict[str, list[tuple[str, str, int, Any]]] = {}
        announced = []
        for key, part, index, tensor_slice in _shards(manifest):
            location, _, volume = part.location.rpartition("@")
            by_volume.setdefault(volume, []).append((key, location, index, tensor_slice))
            announced.append((key, volume, tensor_slice))
        for name, named in by_volume.items():
            await self._volume(name).name_pieces.call_one(named)
        await self._index.announce.call_one(announced)

    async def drop(self, locations: str, keys: str | None = None) -> None:
        """Drop what lies at a location or below it, and the keys that begin so."""
        if keys is not None:
            await self._index.forget.call_one(keys)
        await self._strategy.storage_volumes.drop_pieces.call(locations, keys)

    async def locations(self) -> list[str]:
        """Where pieces lie, published or not."""
        found: Mapping[Any, list[str]] = await self._strategy.storage_volumes.piece_locations.call()
        return [location for _, held in found.items() for location in held]


def place_of(location: str, volume: str) -> str:
    """What a manifest says of a rank's pieces: weights.e0v12.r1.5f0c3a@trainer/0."""
    return f"{location}@{volume}"


def _shards(manifest: Manifest) -> list[tuple[str, RankPieces, int, Any]]:
    """(key, part, index in it, torchstore's slice) of all pieces, under all names of a tensor."""
    from torchstore.transport import TensorSlice

    shards = []
    for entry in tensors_of(manifest).values():
        number = len(entry.pieces)
        for coordinate, piece in enumerate(entry.pieces):
            record = piece.record
            tensor_slice = TensorSlice(
                offsets=record.offsets,
                coordinates=(coordinate,),
                global_shape=record.global_shape,
                local_shape=record.shape,
                mesh_shape=(number,),
            )
            part = manifest.parts[piece.part]
            for name in (entry.name, *record.tied):
                key = tensor_key(manifest.version, name)
                shards.append((key, part, piece.index, tensor_slice))
    return shards


@contextlib.asynccontextmanager
async def _transport_buffer(volume: Any, like: Any) -> AsyncIterator[Any]:
    """How torchstore brings numbers like these from or to a volume."""
    from torchstore.transport import Pipe

    buffer = Pipe(volume).create_transport_buffer()
    buffer.allocate(like)
    try:
        yield buffer
    finally:
        await buffer.drop()
