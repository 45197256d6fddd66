"""Copies of a rank's pieces on the host, and the check that they are finite."""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_trainer.errors import WeightsError
from forge_trainer.functional.pieces.manifests import piece_checksum
from forge_trainer.pieces import Layout, PieceRecord, StagedPieces, Verify, WeightPiece


@dataclass(frozen=True, slots=True)
class Block:
    """Pieces that are copied and checked in one go, while they are in the processor's cache."""

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
        """Fill `staged.copies` from its sources, and take their checksums.

        Raises:
            WeightsError: a value is not finite in the dtype that is published.
        """
        copies, sources = staged.copies, staged.sources
        if blocks is None:
            blocks = [Block((index,), copy) for index, copy in enumerate(copies)]
        gpu = next((source.device for source in sources if source.is_cuda), None)
        if gpu is not None:
            # The current device is the thread's, and this may be any thread.
            with torch.cuda.device(gpu):
                self._copy_from_gpu(staged)
        checksums = [b""] * len(copies)
        for block in blocks:
            if gpu is None:
                torch._foreach_copy_(
                    [copies[index] for index in block.indices],
                    [sources[index] for index in block.indices],
                )
            if not _sum_is_finite(block.numbers):
                _require_finite(staged, block.indices)
            for index in block.indices if self._verify != "off" else ():
                record = staged.layout.records[index]
                checksums[index] = piece_checksum(
                    record, copies[index], staged.version, self._verify
                )
        staged.checksums = tuple(checksums)
        staged.sources = []

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
        for index, (source, copy) in enumerate(zip(staged.sources, staged.copies, strict=True)):
            buffer = self._pinned[index % 2][: copy.nbytes].view(copy.dtype).view(copy.shape)
            with torch.cuda.StreamContext(self._stream):
                buffer.copy_(source.to(copy.dtype), non_blocking=True)
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record(self._stream)
            if waiting is not None:
                _empty(*waiting)
            waiting = (copy, buffer, arrived)
        if waiting is not None:
            _empty(*waiting)


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


class HostBuffers:
    """Memory for copies that a transport sends on, kept for the next version."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        """Of what they hold."""
        self._buffers: list[Tensor] = []

    def take(self, layout: Layout) -> list[Tensor]:
        """One tensor per piece; what they held before is lost."""
        if layout is not self.layout:
            self.layout = layout
            self._buffers = [torch.empty(r.shape, dtype=r.torch_dtype) for r in layout.records]
        return self._buffers


class SpareBuffers:
    """Memory that one reader at a time takes and gives back, kept for the next version."""

    def __init__(self) -> None:
        self._spare: tuple[tuple[PieceRecord, ...], list[Tensor]] | None = None

    def take(self, records: tuple[PieceRecord, ...]) -> list[Tensor]:
        """One tensor per record, which nobody else has."""
        if self._spare is not None and self._spare[0] == records:
            buffers, self._spare = self._spare[1], None
            return buffers
        return [torch.empty(record.shape, dtype=record.torch_dtype) for record in records]

    def give_back(self, records: tuple[PieceRecord, ...], buffers: Sequence[Tensor]) -> None:
        """Keep them instead of those kept so far."""
        self._spare = records, list(buffers)
