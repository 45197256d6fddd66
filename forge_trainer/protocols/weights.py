"""Where published weights live, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from torch import Tensor

from forge_trainer.pieces import (
    Manifest,
    RankPieces,
    StagedPieces,
    WeightPiece,
    WeightsVersion,
)


class ArrivedWeights(Protocol):
    """A whole version that was fetched and verified."""

    async def load(self) -> None:
        """Copy it to the tensors that it was fetched for."""
        ...


class WeightsReading(Protocol):
    """A version that cannot be dropped while it is read."""

    @property
    def manifest(self) -> Manifest: ...

    def arrived(
        self, destinations: Mapping[str, Tensor]
    ) -> AbstractAsyncContextManager[ArrivedWeights]:
        """Fetch and verify a whole model for these tensors, without touching them."""
        ...

    async def load_into(self, destinations: Mapping[str, Tensor]) -> None:
        """Fill a whole model in place, once all of the version has arrived and been verified."""
        ...

    async def read_into(self, destinations: Mapping[str, Tensor]) -> None:
        """Fill some tensors in place; a DTensor gets the shard that is its own."""
        ...

    async def read(
        self, name: str, *, offsets: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """A tensor on the CPU, or a rectangle of it."""
        ...


class WeightStore(Protocol):
    """Holds published weights versions. Nothing is ever overwritten while it can be read.

    Every rank stages and writes its pieces; then one of them commits the manifest.
    """

    @property
    def transport(self) -> str: ...

    def stage(
        self,
        version: WeightsVersion,
        rank: int,
        pieces: Iterable[WeightPiece],
        *,
        in_place: bool = False,
    ) -> StagedPieces:
        """Copy this rank's pieces; or, in place, remember them and copy in `write`.

        Raises:
            WeightsError: they are not finite, or there is no room for them.
        """
        ...

    async def write(self, staged: StagedPieces) -> RankPieces:
        """Bring staged pieces to where readers find them."""
        ...

    async def abandon(self, staged: StagedPieces) -> None:
        """Remove what was staged or written and will not be committed."""
        ...

    async def commit(self, manifest: Manifest) -> None:
        """Make the version exist, at once and whole; WeightsError if it does already."""
        ...

    async def versions(self) -> list[WeightsVersion]:
        """The committed versions, oldest first."""
        ...

    def reading(
        self, version: WeightsVersion | None = None
    ) -> AbstractAsyncContextManager[WeightsReading]:
        """Hold a version, the newest by default, while it is read.

        Raises:
            WeightsError: it does not exist.
        """
        ...

    async def num_readers(self) -> int:
        """Readers that hold a version now."""
        ...

    async def drop(self, version: WeightsVersion) -> bool:
        """Hide the version at once, and delete it unless it is being read; True once it is gone."""
        ...

    async def clean(self) -> list[WeightsVersion]:
        """Remove what former trainers left; the hidden versions that are still read."""
        ...

    def close(self) -> None: ...
