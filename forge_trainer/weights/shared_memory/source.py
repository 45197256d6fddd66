"""The pieces of a version that is held, as views of mapped segments."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from forge_trainer.errors import WeightsError
from forge_trainer.pieces import (
    Layout,
    Manifest,
    PieceAddress,
)

from .segments import Segment


class SegmentSource:
    """Keeps `PieceSource`."""

    def __init__(self, manifest: Manifest, segments: list[tuple[Segment, int]]) -> None:
        self._manifest = manifest
        self._segments = segments

    async def fetch(self, pieces: Sequence[PieceAddress]) -> list[Tensor]:
        self.require_unchanged()
        views = [
            segment.views(Layout.decode(part.layout))
            for part, (segment, _) in zip(self._manifest.parts, self._segments, strict=True)
        ]
        return [views[piece.part][piece.index] for piece in pieces]

    def release(self, pieces: Sequence[PieceAddress], fetched: Sequence[Tensor]) -> None:
        """They are the store's own."""

    def require_unchanged(self) -> None:
        for segment, generation in self._segments:
            if segment.generation != generation:
                raise WeightsError(
                    f"weights {self._manifest.version}: segment {segment.path.name} was used again "
                    f"(generation {segment.generation}, the manifest says {generation})"
                )


def places(manifest: Manifest) -> list[tuple[str, int]]:
    """(file name, generation) of the segment of every part."""
    return [place(part.location) for part in manifest.parts]


def place(location: str) -> tuple[str, int]:
    name, generation = location.split(":")
    return name, int(generation)
