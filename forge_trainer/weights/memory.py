"""Weights in this process: for tests, notebooks and runs without actors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from torch import Tensor

from forge_trainer.errors import WeightsError
from forge_trainer.functional.manifests import assemble, record_piece
from forge_trainer.protocols import Manifest, PieceRecord, TensorEntry, WeightPiece
from forge_trainer.types import Verify, WeightsVersion

from .keys import piece_key, pieces_prefix


class MemoryWeightStore:
    """Keeps the `WeightStore` protocol."""

    def __init__(self, verify: Verify = "full") -> None:
        self._verify: Verify = verify
        self._pieces: dict[str, Tensor] = {}
        self._manifests: dict[WeightsVersion, Manifest] = {}

    async def write_pieces(
        self, version: WeightsVersion, rank: int, pieces: Sequence[WeightPiece]
    ) -> list[PieceRecord]:
        records = []
        for piece in pieces:
            key = piece_key(version, rank, piece.name)
            self._pieces[key] = piece.data
            records.append(record_piece(piece, key, version, self._verify))
        return records

    async def commit(self, manifest: Manifest) -> None:
        self._manifests[manifest.version] = manifest

    async def versions(self) -> list[WeightsVersion]:
        return sorted(self._manifests)

    async def read_manifest(self, version: WeightsVersion) -> Manifest:
        if version not in self._manifests:
            raise WeightsError(f"weights {version} do not exist; held: {sorted(self._manifests)}")
        return self._manifests[version]

    async def read_tensor(self, version: WeightsVersion, entry: TensorEntry) -> Tensor:
        try:
            pieces = [self._pieces[record.location] for record in entry.pieces]
        except KeyError as error:
            raise WeightsError(
                f"weights {version}: piece {error} of {entry.name} is gone"
            ) from error
        return (await asyncio.to_thread(assemble, version, entry, pieces)).clone()

    async def drop(self, version: WeightsVersion) -> None:
        self._manifests.pop(version, None)
        prefix = pieces_prefix(version) + "."
        for key in [key for key in self._pieces if key.startswith(prefix)]:
            del self._pieces[key]
