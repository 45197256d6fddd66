"""Copies of a rank's pieces on the host, and the check that they are finite."""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge_trainer.errors import WeightsError
from forge_trainer.functional.pieces.manifests import piece_checksum
from forge_trainer.pieces import (
    Layout,
    PieceAddress,
    PieceRecord,
    StagedPieces,
    Verify,
    WeightPiece,
)


@dataclass(frozen=True, slots=True)
class Block:
    """Pieces of one dtype that are copied, checked and perhaps sent in one go."""

    indices: tuple[int, ...]
    numbers: Tensor
    """All of them as one tensor."""


class PieceCopier:
    """Copies pieces from any device into host memory, casting on the way, and checks the copies.

    From a GPU they go through two pinned buffers in turn, on a stream of their own, so that
    training does not wait for them and one is emptied while the other fills.
    """

    def __init__(self, verify: Verify) -> None:
        self._verify: Verify = verify
        self._pinned: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    @torch.no_grad()
    def copy(self, staged: StagedPieces, blocks: Sequence[Block] | None = None) -> None:
        """Fill `staged.copies` from its sources. No checksums: whoever steps next waits for this.

        Raises:
            WeightsError: a value is not finite in the dtype that is published.
        """
        for _ in self._copied(staged, blocks):
            pass

    @torch.no_grad()
    def complete(self, staged: StagedPieces, blocks: Sequence[Block] | None = None) -> None:
        """The same, if it has not been done, and take checksums.

        Raises:
            WeightsError: a value is not finite in the dtype that is published.
        """
        indices = self._copied(staged, blocks) if staged.sources else range(len(staged.copies))
        # Right after a block is copied, it is in the processor's cache.
        checksums = {index: self._checksum(staged, index) for index in indices}
        staged.checksums = tuple(checksums[index] for index in range(len(staged.copies)))

    def _copied(self, staged: StagedPieces, blocks: Sequence[Block] | None) -> Iterator[int]:
        """Indices of the pieces as they are copied."""
        if blocks is None:
            blocks = [Block((index,), copy) for index, copy in enumerate(staged.copies)]
        gpu = next((source.device for source in staged.sources if source.is_cuda), None)
        if gpu is not None:
            # The current device is the thread's, and this may be any thread.
            with torch.cuda.device(gpu):
                self._copy_from_gpu(staged)
        for block in blocks:
            if gpu is None:
                torch._foreach_copy_(
                    [staged.copies[index] for index in block.indices],
                    [staged.sources[index] for index in block.indices],
                )
                if not _sum_is_finite(block.numbers):
                    _require_finite(staged, block.indices)
            yield from block.indices
        staged.sources = []

    def _checksum(self, staged: StagedPieces, index: int) -> bytes:
        record = staged.layout.records[index]
        return piece_checksum(record, staged.copies[index], staged.version, self._verify)

    def _copy_from_gpu(self, staged: StagedPieces) -> None:
        largest = max(copy.nbytes for copy in staged.copies)
        if not self._pinned or self._pinned[0].nbytes < largest:
            self._pinned = [
                torch.empty(largest, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        if staged.ready is not None:
            self._stream.wait_event(staged.ready)
        waiting: tuple[Tensor, Tensor, torch.cuda.Event] | None = None
        sums: list[Tensor] = []
        for index, (source, copy) in enumerate(zip(staged.sources, staged.copies, strict=True)):
            buffer = self._pinned[index % 2][: copy.nbytes].view(copy.dtype).view(copy.shape)
            with torch.cuda.StreamContext(self._stream):
                published = source.to(copy.dtype)
                buffer.copy_(published, non_blocking=True)
                # Of what is published, on the device: a pass on the host would take far longer.
                sums.append(published.sum().to(torch.complex128))
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record(self._stream)
            if waiting is not None:
                _empty(*waiting)
            waiting = (copy, buffer, arrived)
        if waiting is not None:
            _empty(*waiting)
        with torch.cuda.StreamContext(self._stream):
            is_finite = torch.isfinite(torch.stack(sums)).tolist()
        _require_finite(staged, [index for index, is_ok in enumerate(is_finite) if not is_ok])


def _empty(copy: Tensor, buffer: Tensor, arrived: torch.cuda.Event) -> None:
    arrived.synchronize()
    copy.copy_(buffer)


def sources_of(pieces: Sequence[WeightPiece]) -> tuple[list[Tensor], torch.cuda.Event | None]:
    """What the pieces are to be read from, and when a GPU will have computed it."""
    sources = [piece.data for piece in pieces]
    if not any(source.is_cuda for source in sources):
        return sources, None
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record()
    return sources, ready


def _sum_is_finite(tensor: Tensor) -> bool:
    """A sum of finite numbers may overflow, but one with a nan or infinity in it is not finite."""
    has_nan = tensor.is_floating_point() or tensor.is_complex()
    return not has_nan or cmath.isfinite(tensor.sum().item())


def _require_finite(staged: StagedPieces, indices: Sequence[int]) -> None:
    for index in indices:
        if not torch.isfinite(staged.copies[index]).all():
            name = staged.layout.records[index].name
            raise WeightsError(f"weights {staged.version}: {name} is not finite; not published")


def in_blocks(
    records: Sequence[PieceRecord], num_bytes: int, parts: Sequence[int] | None = None
) -> Iterator[tuple[torch.dtype, list[int]]]:
    """Indices of pieces of one dtype, and one part, that hold at most `num_bytes`; larger alone.

    Args:
        num_bytes: of a block.
        parts: what every piece is a part of; all of one if left out.
    """
    by_kind: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, record in enumerate(records):
        part = 0 if parts is None else parts[index]
        by_kind.setdefault((part, record.torch_dtype), []).append(index)
    for (_, dtype), indices in by_kind.items():
        block: list[int] = []
        held = 0
        for index in indices:
            if block and held + records[index].num_bytes > num_bytes:
                yield dtype, block
                block, held = [], 0
            block.append(index)
            held += records[index].num_bytes
        yield dtype, block


class PackedPieces(Sequence[Tensor]):
    """Host memory for pieces, in the order of their records, side by side in blocks."""

    def __init__(
        self, records: Sequence[PieceRecord], num_bytes: int, parts: Sequence[int] | None = None
    ) -> None:
        """See `in_blocks`."""
        pieces: dict[int, Tensor] = {}
        self.blocks: list[Block] = []
        for dtype, indices in in_blocks(records, num_bytes, parts):
            shapes = [records[index].shape for index in indices]
            sizes = [math.prod(shape) for shape in shapes]
            numbers = torch.empty(sum(sizes), dtype=dtype)
            self.blocks.append(Block(tuple(indices), numbers))
            for index, shape, part in zip(
                indices, shapes, torch.split(numbers, sizes), strict=True
            ):
                pieces[index] = part.view(shape)
        self._pieces = [pieces[index] for index in range(len(pieces))]

    def __getitem__(self, index: Any) -> Any:
        return self._pieces[index]

    def __len__(self) -> int:
        return len(self._pieces)


class HostBuffers:
    """Memory for copies that a transport sends on, kept for the next version."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.layout: Layout | None = None
        """Of what they hold."""
        self._buffers = PackedPieces([], block_bytes)

    def take(self, layout: Layout) -> PackedPieces:
        """One tensor per piece; what they held before is lost."""
        if layout is not self.layout:
            self.layout = layout
            self._buffers = PackedPieces(layout.records, self._block_bytes)
        return self._buffers


class SpareBuffers:
    """Memory that one reader at a time takes and gives back, kept for the next version."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._spare: tuple[Any, PackedPieces] | None = None

    def take(self, pieces: Sequence[PieceAddress]) -> PackedPieces:
        """One tensor per piece, which nobody else has; a block is of one part."""
        if self._spare is not None and self._spare[0] == pieces:
            buffers, self._spare = self._spare[1], None
            return buffers
        parts = [piece.part for piece in pieces]
        return PackedPieces([piece.record for piece in pieces], self._block_bytes, parts)

    def give_back(self, pieces: Sequence[PieceAddress], buffers: PackedPieces) -> None:
        """Keep them instead of those kept so far."""
        self._spare = pieces, buffers
