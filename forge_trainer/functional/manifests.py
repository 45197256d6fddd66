"""What makes a version whole: records of pieces, a manifest over them, and the check on reading."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from forge_trainer.errors import WeightsError
from forge_trainer.protocols import Manifest, PieceRecord, TensorEntry, WeightPiece
from forge_trainer.types import Verify, WeightsVersion

SAMPLED = 8
"""With `verify: sample`, one in so many tensors of a version is verified."""


def is_verified(name: str, version: WeightsVersion, verify: Verify) -> bool:
    """True if the tensor gets a checksum in this version.

    In a sample every tensor has its turn once in `SAMPLED` versions that follow each other.
    """
    if verify == "sample":
        return (xxhash.xxh32_intdigest(name.encode()) - version.policy_version) % SAMPLED == 0
    return verify == "full"


def record_piece(
    piece: WeightPiece, location: str, version: WeightsVersion, verify: Verify = "full"
) -> PieceRecord:
    """The record of a piece of `version` that is stored at `location`."""
    return PieceRecord(
        name=piece.name,
        dtype=dtype_name(piece.data.dtype),
        global_shape=piece.global_shape,
        offsets=piece.offsets,
        shape=tuple(piece.data.shape),
        location=location,
        checksum=checksum(piece.data) if is_verified(piece.name, version, verify) else None,
        num_bytes=piece.data.nbytes,
    )


def checksum(tensor: Tensor) -> str:
    """xxh3-128 of the tensor's bytes in row-major order."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(data.data)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def build_manifest(version: WeightsVersion, records: Sequence[PieceRecord]) -> Manifest:
    """The manifest over the pieces of all ranks.

    Raises:
        WeightsError: the pieces of a tensor disagree, overlap or leave a hole.
    """
    if not records:
        raise WeightsError(f"weights {version}: no rank wrote any tensor")
    tensors = {}
    by_name = itertools.groupby(sorted(records, key=_name), key=_name)
    for name, group in by_name:
        pieces = tuple(sorted(group, key=lambda piece: piece.offsets))
        entry = TensorEntry(name, pieces[0].global_shape, pieces[0].dtype, pieces)
        _require_tiling(version, entry)
        tensors[name] = entry
    return Manifest(version, tensors)


def _name(record: PieceRecord) -> str:
    return record.name


def _require_tiling(version: WeightsVersion, entry: TensorEntry) -> None:
    for piece in entry.pieces:
        if (piece.global_shape, piece.dtype) != (entry.global_shape, entry.dtype):
            raise WeightsError(f"weights {version}: ranks disagree on {entry.name}: {entry.pieces}")
    for one, other in itertools.combinations(entry.pieces, 2):
        if _overlap(one, other):
            raise WeightsError(f"weights {version}: pieces of {entry.name} overlap")
    held = sum(torch.Size(piece.shape).numel() for piece in entry.pieces)
    wanted = torch.Size(entry.global_shape).numel()
    if held != wanted:
        raise WeightsError(
            f"weights {version}: pieces of {entry.name} hold {held} of {wanted} elements"
        )


def _overlap(one: PieceRecord, other: PieceRecord) -> bool:
    spans = zip(one.offsets, one.shape, other.offsets, other.shape, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in spans)


def assemble(version: WeightsVersion, entry: TensorEntry, pieces: Sequence[Tensor]) -> Tensor:
    """The whole tensor from its pieces, each checked against its record.

    Raises:
        WeightsError: a piece has another shape, dtype or (if there is one) checksum than the
            manifest says.
    """
    for record, data in zip(entry.pieces, pieces, strict=True):
        found = (tuple(data.shape), dtype_name(data.dtype))
        if found != (record.shape, record.dtype):
            raise WeightsError(
                f"weights {version}: piece of {entry.name} at {record.offsets} is {found}, the "
                f"manifest says {(record.shape, record.dtype)}"
            )
        if record.checksum is not None and checksum(data) != record.checksum:
            raise WeightsError(
                f"weights {version}: checksum of {entry.name} at {record.offsets} does not match"
            )
    if len(pieces) == 1:
        return pieces[0]
    whole = torch.empty(entry.global_shape, dtype=pieces[0].dtype)
    for record, data in zip(entry.pieces, pieces, strict=True):
        region = tuple(
            slice(start, start + size)
            for start, size in zip(record.offsets, record.shape, strict=True)
        )
        whole[region] = data
    return whole


def check_fits(manifest: Manifest, expected: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """A reader's tensors, name -> (shape, dtype), must be those of the manifest, one for one.

    Raises:
        WeightsError: missing, extra or different tensors, with the version.
    """
    missing = sorted(expected.keys() - manifest.tensors.keys())
    extra = sorted(manifest.tensors.keys() - expected.keys())
    different = [
        f"{name} is {found}, the model has {wanted}"
        for name, wanted in expected.items()
        if (entry := manifest.tensors.get(name)) is not None
        and (found := (entry.global_shape, entry.dtype)) != wanted
    ]
    if missing or extra or different:
        raise WeightsError(
            f"weights {manifest.version} do not fit the model: missing {missing[:5]}, "
            f"extra {extra[:5]}, different {different[:5]}"
        )
