"""What published weights are made of: versions, pieces of tensors, and the manifest over them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import torch
from torch import Tensor

Verify = Literal["full", "sample", "off"]


@dataclass(frozen=True, slots=True, order=True)
class WeightsVersion:
    """Totally ordered name of a set of weights; every load or restart opens a new epoch."""

    epoch: int
    policy_version: int

    def __str__(self) -> str:
        return f"e{self.epoch}v{self.policy_version}"


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """What `push_weights` published, and what `pull_weights` takes."""

    version: WeightsVersion
    num_tensors: int
    num_bytes: int
    dtype: str
    transport: str
    """How the pieces travel: shared_memory, torchstore or memory."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a weight store is reached."""

    transport: str
    location: str
    """The folder of a shared-memory store, or the name of a torchstore."""


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """One rank's rectangle of one tensor in Hugging Face layout, on its way to a store."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: Tensor
    """On any device. May be a view of a live parameter: it says what that says when it is read."""
    dtype: torch.dtype
    """What it is published in."""
    tied: tuple[str, ...] = ()
    """Further names of the same tensor."""

    @property
    def record(self) -> PieceRecord:
        shape = tuple(self.data.shape)
        return PieceRecord(
            self.name, dtype_name(self.dtype), self.global_shape, self.offsets, shape, self.tied
        )


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """What a published piece is, without its values."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    tied: tuple[str, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        return _torch_dtype(self.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


class Layout:
    """The pieces of one rank, in order, and what follows from them alone.

    It is the same from version to version, so a store keeps it: with hundreds of small tensors,
    working it out again takes longer than copying them.
    """

    def __init__(self, records: tuple[PieceRecord, ...]) -> None:
        self.records = records
        self.num_bytes = sum(record.num_bytes for record in records)
        self.encoded = json.dumps([astuple(record) for record in records]).encode()

    @classmethod
    def of(cls, pieces: Sequence[WeightPiece], last: Layout | None) -> Layout:
        """Of these pieces; `last` itself if it is the same."""
        if last is not None and last.describes(pieces):
            return last
        return cls(tuple(piece.record for piece in pieces))

    def describes(self, pieces: Sequence[WeightPiece]) -> bool:
        """True if it is the layout of these pieces."""
        return len(pieces) == len(self.records) and all(
            piece.name == record.name
            and piece.data.shape == record.shape
            and piece.offsets == record.offsets
            and piece.global_shape == record.global_shape
            and piece.dtype == record.torch_dtype
            and piece.tied == record.tied
            for piece, record in zip(pieces, self.records, strict=True)
        )

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def decode(encoded: bytes) -> Layout:
        """The layout that was encoded so."""
        return Layout(
            tuple(
                PieceRecord(name, dtype, tuple(whole), tuple(offsets), tuple(shape), tuple(tied))
                for name, dtype, whole, offsets, shape, tied in json.loads(encoded)
            )
        )


@dataclass(frozen=True, slots=True)
class RankPieces:
    """What one rank wrote of one version."""

    layout: bytes
    """Its `Layout`, encoded: the same bytes from version to version, so decoded once."""
    checksums: tuple[bytes, ...]
    """xxh3-128 of every piece's bytes, in the order of the layout; empty if it is not verified."""
    location: str
    """Where the store keeps them."""


@dataclass(slots=True)
class StagedPieces:
    """Pieces of one rank on their way into a store, see `WeightStore.stage`."""

    version: WeightsVersion
    layout: Layout
    sources: list[Tensor]
    """What to publish; empty once it is copied."""
    copies: Sequence[Tensor]
    """Where it is copied to: on the CPU, in the published dtype."""
    location: str
    ready: torch.cuda.Event | None = None
    """Passed when the GPU has computed the sources."""
    checksums: tuple[bytes, ...] = ()
    """Of the copies, once they are made."""

    @property
    def written(self) -> RankPieces:
        """What to say of them once they are where readers find them."""
        return RankPieces(self.layout.encoded, self.checksums, self.location)


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """What one rank says of the pieces it staged."""

    step: int
    """Of its engine."""
    layout: bytes
    """Of its pieces, as in `RankPieces`."""
    written: RankPieces | None
    """None while they are being written."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a whole tensor is, without its values."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str
    """xxh3-128 of its bytes, hexadecimal."""
    tied: tuple[str, ...] = ()
    """Further names of the same tensor."""


@dataclass(frozen=True, slots=True)
class WeightChecksums:
    """The weights that a generator runs on."""

    version: WeightsVersion
    tensors: dict[str, TensorFacts]
    """By name; a tied tensor under one of its names."""


@dataclass(frozen=True, slots=True)
class PieceAddress:
    """A piece in a manifest."""

    part: int
    """Index of what its rank wrote, in `Manifest.parts`."""
    index: int
    """Index in that part's layout."""
    record: PieceRecord


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor and the pieces that tile it."""

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    pieces: tuple[PieceAddress, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole of one weights version. Written last: a version exists when its manifest does.

    `forge_trainer.functional.pieces.manifests` builds and reads it.
    """

    version: WeightsVersion
    transport: str
    parts: tuple[RankPieces, ...]
