"""The pieces of a version that is held, fetched from torchstore's volumes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import cast

from torch import Tensor

from forge_trainer.errors import WeightsError
from forge_trainer.pieces import Manifest, PieceAddress, dtype_name
from forge_trainer.weights.staging import Block, PackedPieces, SpareBuffers

from .calls import bounded_gather
from .volumes import Volumes


class VolumeSource:
    """Keeps `PieceSource`."""

    def __init__(
        self,
        volumes: Volumes,
        manifest: Manifest,
        buffers: SpareBuffers,
        failures: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._volumes = volumes
        self._manifest = manifest
        self._buffers = buffers
        self._failures = failures

    async def fetch(self, pieces: Sequence[PieceAddress]) -> PackedPieces:
        async def get(block: Block) -> None:
            wanted = [pieces[index] for index in block.indices]
            place = self._manifest.parts[wanted[0].part].location
            with self._failures(self._what(wanted)):
                numbers = await self._volumes.read(
                    place, [piece.index for piece in wanted], block.numbers
                )
            if (numbers.shape, numbers.dtype) != (block.numbers.shape, block.numbers.dtype):
                raise WeightsError(
                    f"{self._what(wanted)}: {numbers.numel()} {dtype_name(numbers.dtype)} came, "
                    f"the manifest says {block.numbers.numel()} {dtype_name(block.numbers.dtype)}"
                )
            block.numbers.copy_(numbers)

        # What arrives is in fresh memory, and holding all of that would take longer than a copy.
        buffers = self._buffers.take(pieces)
        await bounded_gather(get, buffers.blocks)
        return buffers

    def _what(self, pieces: Sequence[PieceAddress]) -> str:
        record = pieces[0].record
        more = f" and {len(pieces) - 1} more" if len(pieces) > 1 else ""
        what = f"the piece of {record.name} at {record.offsets}{more}"
        return f"weights {self._manifest.version}: cannot read {what}"

    def release(self, pieces: Sequence[PieceAddress], fetched: Sequence[Tensor]) -> None:
        self._buffers.give_back(pieces, cast(PackedPieces, fetched))

    def require_unchanged(self) -> None:
        """What arrived is this process's own."""
