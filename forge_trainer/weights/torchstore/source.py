"""The pieces of a version that is held, fetched from torchstore by key."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from forge_trainer.functional.pieces.manifests import require_layout
from forge_trainer.pieces import (
    Manifest,
    PieceAddress,
    PieceRecord,
)
from forge_trainer.weights.staging import SpareBuffers

from .calls import bounded_gather


class KeySource:
    """Keeps `PieceSource`."""

    def __init__(
        self,
        client: Any,
        manifest: Manifest,
        buffers: SpareBuffers,
        failures: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._client = client
        self._manifest = manifest
        self._buffers = buffers
        self._failures = failures

    async def fetch(self, pieces: Sequence[PieceAddress]) -> list[Tensor]:
        from torchstore.transport import Request

        any_tensor = Request.from_any(None)
        one_of_each = {piece.part: piece for piece in pieces}
        found = await bounded_gather(self._volume_of, list(one_of_each.values()))
        volumes = dict(zip(one_of_each, found, strict=True))

        async def get(item: tuple[PieceAddress, Tensor]) -> Tensor:
            piece, buffer = item
            key = self._key(piece)
            with self._failures(self._what(piece)):
                data: Tensor = await volumes[piece.part].get_from_storage_volume(key, any_tensor)
            require_layout(self._manifest, piece, data)
            return buffer.copy_(data)

        # What arrives is in fresh memory, and holding all of that would take longer than a copy.
        buffers = self._buffers.take(_records(pieces))
        return await bounded_gather(get, list(zip(pieces, buffers, strict=True)))

    async def _volume_of(self, piece: PieceAddress) -> Any:
        """Where a piece lies, and so all that its rank wrote.

        The client's own `get` asks for that twice per key, which is two of its three calls.
        """
        from torchstore.transport import Pipe

        with self._failures(self._what(piece)):
            (volume, *_) = await self._client._locate_volumes(self._key(piece))
        return Pipe(self._client.strategy.get_storage_volume(volume))

    def _key(self, piece: PieceAddress) -> str:
        return f"{self._manifest.parts[piece.part].location}.{piece.record.name}"

    def _what(self, piece: PieceAddress) -> str:
        record = piece.record
        version = self._manifest.version
        return f"weights {version}: cannot read the piece of {record.name} at {record.offsets}"

    def release(self, pieces: Sequence[PieceAddress], fetched: Sequence[Tensor]) -> None:
        self._buffers.give_back(_records(pieces), fetched)

    def require_unchanged(self) -> None:
        """What arrived is this process's own."""


def _records(pieces: Sequence[PieceAddress]) -> tuple[PieceRecord, ...]:
    return tuple(piece.record for piece in pieces)
