"""Weights in torchstore: works across hosts, any tensor can be fetched by name.

Pieces are plain tensors under keys of their own version. DTensors are not put as such:
torchstore 0.1.2 cannot read back empty shards, cannot delete half-written ones, and stores a
replicated tensor once per rank. The manifest knows the offsets instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from forge_trainer.errors import WeightsError
from forge_trainer.functional.manifests import assemble, record_piece
from forge_trainer.protocols import Manifest, PieceRecord, TensorEntry, WeightPiece
from forge_trainer.types import Verify, WeightsVersion

from .keys import MANIFESTS, manifest_key, piece_key, pieces_prefix, version_of_manifest

MAX_CONCURRENT_CALLS = 16
"""Each put or get is a call of its own; beyond a few in flight nothing gets faster."""

T = TypeVar("T")


class TorchStoreWeightStore:
    """Keeps the `WeightStore` protocol over a torchstore that is running already."""

    def __init__(self, store_name: str, verify: Verify = "full") -> None:
        self._store_name = store_name
        self._verify: Verify = verify

    async def _client(self) -> Any:
        # Imported late: importing torchstore sets up root logging unless the process was prepared.
        import torchstore

        return await torchstore.client(self._store_name)

    async def write_pieces(
        self, version: WeightsVersion, rank: int, pieces: Sequence[WeightPiece]
    ) -> list[PieceRecord]:
        client = await self._client()

        async def write(piece: WeightPiece) -> PieceRecord:
            key = piece_key(version, rank, piece.name)
            await client.put(key, piece.data)
            return await asyncio.to_thread(record_piece, piece, key, version, self._verify)

        return await _bounded_gather(write, pieces)

    async def commit(self, manifest: Manifest) -> None:
        client = await self._client()
        await client.put(manifest_key(manifest.version), manifest)

    async def versions(self) -> list[WeightsVersion]:
        client = await self._client()
        return sorted(version_of_manifest(key) for key in await client.keys(MANIFESTS))

    async def read_manifest(self, version: WeightsVersion) -> Manifest:
        client = await self._client()
        try:
            manifest: Manifest = await client.get(manifest_key(version))
        except KeyError as error:
            held = [str(v) for v in await self.versions()]
            raise WeightsError(f"weights {version} do not exist; held: {held}") from error
        except Exception as error:
            raise WeightsError(f"weights {version}: the store failed: {error}") from error
        return manifest

    async def read_tensor(self, version: WeightsVersion, entry: TensorEntry) -> Tensor:
        client = await self._client()

        async def read(record: PieceRecord) -> Tensor:
            data: Tensor = await client.get(record.location)
            return data

        try:
            pieces = await _bounded_gather(read, entry.pieces)
        except Exception as error:
            raise WeightsError(f"weights {version}: cannot read {entry.name}: {error}") from error
        return await asyncio.to_thread(assemble, version, entry, pieces)

    async def drop(self, version: WeightsVersion) -> None:
        """Delete the manifest first, so that no reader starts on a version that is going away."""
        client = await self._client()
        for key in await client.keys(manifest_key(version)):
            await client.delete(key)
        await _bounded_gather(client.delete, await client.keys(pieces_prefix(version)))


async def _bounded_gather(function: Callable[[Any], Awaitable[T]], items: Sequence[Any]) -> list[T]:
    """The results in order, with at most MAX_CONCURRENT_CALLS running at once."""
    slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def run(item: Any) -> T:
        async with slots:
            return await function(item)

    return list(await asyncio.gather(*(run(item) for item in items)))
