"""What makes a version whole: records of pieces, a manifest over them, and the check on reading."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from forge_trainer.errors import WeightsError
from forge_trainer.pieces import (
    Layout,
    Manifest,
    PieceAddress,
    PieceRecord,
    RankPieces,
    TensorEntry,
    TensorFacts,
    Verify,
    WeightsVersion,
    dtype_name,
)

from .rectangles import any_overlap

SAMPLED = 8
"""With `verify: sample`, one in so many tensors of a version is verified."""


def is_verified(name: str, version: WeightsVersion, verify: Verify) -> bool:
    """True if the tensor gets a checksum in this version.

    In a sample it is drawn by name and version, so every tensor has its turn whichever versions are
    published.
    """
    if verify == "sample":
        return xxhash.xxh32_intdigest(f"{name}:{version}".encode()) % SAMPLED == 0
    return verify == "full"


def checksum(tensor: Tensor) -> bytes:
    """xxh3-128 of the tensor's bytes in row-major order."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_digest(data.data)


def describe_tensor(tensor: Tensor, tied: tuple[str, ...] = ()) -> TensorFacts:
    """Shape, dtype and checksum of a whole tensor on the CPU."""
    shape = tuple(tensor.shape)
    return TensorFacts(shape, dtype_name(tensor.dtype), checksum(tensor).hex(), tied)


def piece_checksum(
    record: PieceRecord, tensor: Tensor, version: WeightsVersion, verify: Verify
) -> bytes:
    """What `RankPieces.checksums` holds of a piece; empty if it is not verified."""
    return checksum(tensor) if is_verified(record.name, version, verify) else b""


def build_manifest(
    version: WeightsVersion, transport: str, parts: Sequence[RankPieces]
) -> Manifest:
    """The manifest over what all ranks wrote.

    Raises:
        WeightsError: the pieces of a tensor disagree, overlap or leave a hole.
    """
    manifest = Manifest(version, transport, tuple(parts))
    if not tensors_of(manifest):
        raise WeightsError(f"weights {version}: no rank wrote any tensor")
    return manifest


def tensors_of(manifest: Manifest) -> Mapping[str, TensorEntry]:
    """The tensors of a version by name, without further names of tied ones.

    Raises:
        WeightsError: the pieces of a tensor disagree, overlap or leave a hole.
    """
    try:
        return _read_layouts(tuple(part.layout for part in manifest.parts))
    except WeightsError as error:
        raise WeightsError(f"weights {manifest.version}: {error}") from None


def ties_of(manifest: Manifest) -> dict[str, str]:
    """Further names of tied tensors, and the names they are published under."""
    return {
        other: name
        for name, entry in tensors_of(manifest).items()
        for other in entry.pieces[0].record.tied
    }


def num_bytes_of(manifest: Manifest) -> int:
    """Bytes of all pieces."""
    return sum(Layout.decode(part.layout).num_bytes for part in manifest.parts)


@functools.lru_cache(maxsize=8)
def _read_layouts(layouts: tuple[bytes, ...]) -> dict[str, TensorEntry]:
    by_name: dict[str, list[PieceAddress]] = {}
    for part, layout in enumerate(layouts):
        for index, record in enumerate(Layout.decode(layout).records):
            by_name.setdefault(record.name, []).append(PieceAddress(part, index, record))
    tensors = {}
    for name in sorted(by_name):
        pieces = tuple(sorted(by_name[name], key=lambda piece: piece.record.offsets))
        first = pieces[0].record
        tensors[name] = TensorEntry(name, first.global_shape, first.dtype, pieces)
        _require_tiling(name, [piece.record for piece in pieces])
    return tensors


def _require_tiling(name: str, records: Sequence[PieceRecord]) -> None:
    if len({(r.global_shape, r.dtype, r.tied) for r in records}) > 1:
        raise WeightsError(f"ranks disagree on {name}: {list(records)}")
    rectangles = [(record.offsets, record.shape) for record in records]
    if any_overlap(rectangles, records[0].global_shape):
        raise WeightsError(f"pieces of {name} overlap")
    held = sum(torch.Size(record.shape).numel() for record in records)
    wanted = torch.Size(records[0].global_shape).numel()
    if held != wanted:
        raise WeightsError(f"pieces of {name} hold {held} of {wanted} elements")


def require_checksums(
    manifest: Manifest, pieces: Sequence[PieceAddress], tensors: Sequence[Tensor]
) -> None:
    """Pieces as they were read must be what was published, as far as that was recorded.

    Raises:
        WeightsError: a checksum does not match.
    """
    if not any(any(part.checksums) for part in manifest.parts):
        return
    for piece, data in zip(pieces, tensors, strict=True):
        wanted = manifest.parts[piece.part].checksums[piece.index]
        if wanted and checksum(data) != wanted:
            raise WeightsError(
                f"weights {manifest.version}: checksum of {piece.record.name} at "
                f"{piece.record.offsets} does not match"
            )


def check_fits(
    manifest: Manifest,
    expected: Mapping[str, tuple[tuple[int, ...], str]],
    *,
    whole: bool = True,
) -> None:
    """A reader's tensors, name -> (shape, dtype), must be in the manifest; if `whole`, be all.

    A tensor that the manifest says is tied may be expected under any of its names, or several.

    Raises:
        WeightsError: missing, extra or different tensors, with the version.
    """
    tensors, ties = tensors_of(manifest), ties_of(manifest)
    found = {name: tensors.get(ties.get(name, name)) for name in expected}
    missing = sorted(name for name, entry in found.items() if entry is None)
    taken = {entry.name for entry in found.values() if entry is not None}
    extra = sorted(tensors.keys() - taken) if whole else []
    different = [
        f"{name} is {(entry.global_shape, entry.dtype)}, the model has {expected[name]}"
        for name, entry in found.items()
        if entry is not None and (entry.global_shape, entry.dtype) != expected[name]
    ]
    if missing or extra or different:
        raise WeightsError(
            f"weights {manifest.version} do not fit the model: missing {missing[:5]}, "
            f"extra {extra[:5]}, different {different[:5]}"
        )
