"""Weights in this process: for tests, notebooks and runs without actors."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from forge_trainer.errors import WeightsError
from forge_trainer.pieces import (
    Layout,
    Manifest,
    PieceAddress,
    RankPieces,
    StagedPieces,
    Verify,
    WeightPiece,
    WeightsVersion,
)

from .keys import missing, pieces_prefix, published_already
from .reading import Plans, VersionReading
from .staging import PieceCopier, sources_of


class MemoryWeightStore:
    """Keeps the `WeightStore` protocol."""

    transport = "memory"

    def __init__(self, verify: Verify = "full") -> None:
        self._copier = PieceCopier(verify)
        self._plans = Plans()
        self._pieces: dict[str, Sequence[Tensor]] = {}
        self._manifests: dict[WeightsVersion, Manifest] = {}
        self._hidden: dict[WeightsVersion, Manifest] = {}
        self._readers: Counter[WeightsVersion] = Counter()

    def stage(
        self,
        version: WeightsVersion,
        rank: int,
        pieces: Iterable[WeightPiece],
        *,
        in_place: bool = False,
    ) -> StagedPieces:
        pieces = list(pieces)
        sources, ready = sources_of(pieces)
        copies = [torch.empty(piece.data.shape, dtype=piece.dtype) for piece in pieces]
        layout = Layout.of(pieces, None)
        location = f"{pieces_prefix(version, rank)}.{secrets.token_hex(4)}"
        staged = StagedPieces(version, layout, sources, copies, location, ready)
        if not in_place:
            self._copier.copy(staged)
        return staged

    async def write(self, staged: StagedPieces) -> RankPieces:
        await asyncio.to_thread(self._copier.complete, staged)
        self._pieces[staged.location] = staged.copies
        return staged.written

    async def abandon(self, staged: StagedPieces) -> None:
        self._pieces.pop(staged.location, None)

    async def commit(self, manifest: Manifest) -> None:
        if manifest.version in self._manifests:
            raise published_already(manifest.version)
        self._manifests[manifest.version] = manifest

    async def versions(self) -> list[WeightsVersion]:
        return sorted(self._manifests)

    @contextlib.asynccontextmanager
    async def reading(self, version: WeightsVersion | None = None) -> AsyncIterator[VersionReading]:
        held = sorted(self._manifests)
        wanted = version or (held[-1] if held else None)
        if wanted is None or wanted not in self._manifests:
            raise missing(wanted, held)
        manifest = self._manifests[wanted]
        self._readers[wanted] += 1
        try:
            yield VersionReading(manifest, _Pieces(self._pieces, manifest), self._plans)
        finally:
            self._readers[wanted] -= 1
            # Without those that nobody reads.
            self._readers = +self._readers

    async def num_readers(self) -> int:
        return self._readers.total()

    async def drop(self, version: WeightsVersion) -> bool:
        if version in self._manifests:
            self._hidden[version] = self._manifests.pop(version)
        if self._readers[version]:
            return False
        manifest = self._hidden.pop(version, None)
        for part in () if manifest is None else manifest.parts:
            self._pieces.pop(part.location, None)
        return True

    async def clean(self) -> list[WeightsVersion]:
        known = [*self._manifests.values(), *self._hidden.values()]
        named = {part.location for manifest in known for part in manifest.parts}
        for location in self._pieces.keys() - named:
            del self._pieces[location]
        return list(self._hidden)

    def close(self) -> None:
        """Let go of the reader's tensors."""
        self._plans = Plans()


class _Pieces:
    """Keeps `PieceSource`."""

    def __init__(self, pieces: Mapping[str, Sequence[Tensor]], manifest: Manifest) -> None:
        self._pieces = pieces
        self._manifest = manifest

    async def fetch(self, pieces: Sequence[PieceAddress]) -> list[Tensor]:
        parts = self._manifest.parts
        try:
            return [self._pieces[parts[piece.part].location][piece.index] for piece in pieces]
        except KeyError as error:
            raise WeightsError(
                f"weights {self._manifest.version}: pieces of a rank are gone: {error}"
            ) from error

    def release(self, pieces: Sequence[PieceAddress], fetched: Sequence[Tensor]) -> None:
        """They are the store's own."""

    def require_unchanged(self) -> None:
        """What is in memory is never overwritten."""
