"""Manifests and the in-memory store: a version is whole, or it is an error that says which."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from forge_trainer.errors import WeightsError
from forge_trainer.functional.manifests import (
    assemble,
    build_manifest,
    check_fits,
    checksum,
    is_verified,
    record_piece,
)
from forge_trainer.protocols import Manifest, PieceRecord, WeightPiece
from forge_trainer.types import Verify, WeightsVersion
from forge_trainer.weights.keys import manifest_key, piece_key, version_of_manifest
from forge_trainer.weights.memory import MemoryWeightStore

VERSION = WeightsVersion(0, 3)
FULL = torch.arange(12.0).reshape(4, 3)


def _pieces(*row_ranges: tuple[int, int]) -> list[WeightPiece]:
    return [WeightPiece("w", (4, 3), (start, 0), FULL[start:end]) for start, end in row_ranges]


def _records(*row_ranges: tuple[int, int]) -> list[PieceRecord]:
    return [record_piece(piece, f"at{i}", VERSION) for i, piece in enumerate(_pieces(*row_ranges))]


def test_versions_are_ordered_by_epoch_first() -> None:
    assert WeightsVersion(0, 9) < WeightsVersion(1, 2) < WeightsVersion(1, 3)
    assert version_of_manifest(manifest_key(WeightsVersion(2, 17))) == WeightsVersion(2, 17)
    assert piece_key(VERSION, 1, "a.b") == "weights.e0v3.r1.a.b"
    with pytest.raises(ValueError, match="not a manifest key"):
        version_of_manifest("weights.e0v3")


def test_a_tensor_comes_back_from_its_pieces_in_any_order() -> None:
    manifest = build_manifest(VERSION, _records((2, 4), (0, 2)))
    entry = manifest.tensors["w"]
    by_location = {"at0": FULL[2:4], "at1": FULL[0:2]}
    whole = assemble(VERSION, entry, [by_location[piece.location] for piece in entry.pieces])
    assert torch.equal(whole, FULL)
    assert manifest.num_bytes == 48


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 2)], "hold 6 of 12 elements"),
        ([(0, 2), (3, 4)], "hold 9 of 12"),
        ([(0, 3), (2, 4)], "pieces of w overlap"),
        ([(0, 4), (0, 4)], "pieces of w overlap"),
    ],
)
def test_holes_and_overlaps_are_not_published(ranges: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(WeightsError, match=f"e0v3: .*{message}"):
        build_manifest(VERSION, _records(*ranges))


def test_ranks_must_agree_on_a_tensor() -> None:
    first, second = _records((0, 2), (2, 4))
    with pytest.raises(WeightsError, match="ranks disagree on w"):
        build_manifest(VERSION, [first, dataclasses.replace(second, dtype="bfloat16")])
    with pytest.raises(WeightsError, match="no rank wrote any tensor"):
        build_manifest(VERSION, [])


def test_a_flipped_byte_is_caught_with_version_and_tensor() -> None:
    entry = build_manifest(VERSION, _records((0, 4))).tensors["w"]
    damaged = FULL.clone()
    damaged.view(torch.uint8)[1, 5] ^= 1
    with pytest.raises(WeightsError, match="e0v3: checksum of w at"):
        assemble(VERSION, entry, [damaged])
    with pytest.raises(WeightsError, match="piece of w .* the manifest says"):
        assemble(VERSION, entry, [FULL[:2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_checksums_depend_on_values_not_on_strides(dtype: torch.dtype) -> None:
    tensor = FULL.to(dtype)
    assert checksum(tensor) == checksum(tensor.T.contiguous().T)
    assert checksum(tensor) != checksum(tensor + 1)
    assert checksum(torch.tensor(1.0, dtype=dtype)) == checksum(torch.tensor([1.0], dtype=dtype))


def test_a_reader_wants_exactly_its_own_tensors() -> None:
    manifest = build_manifest(VERSION, _records((0, 4)))
    check_fits(manifest, {"w": ((4, 3), "float32")})
    for expected, message in (
        ({"w": ((4, 3), "float32"), "b": ((4,), "float32")}, r"missing \['b'\]"),
        ({}, r"extra \['w'\]"),
        ({"w": ((3, 4), "float32")}, r"different \[.w is \(\(4, 3\)"),
        ({"w": ((4, 3), "bfloat16")}, "the model has"),
    ):
        with pytest.raises(WeightsError, match=f"e0v3 do not fit the model.*{message}"):
            check_fits(manifest, expected)


def test_a_version_exists_once_its_manifest_does() -> None:
    async def scenario() -> None:
        store = MemoryWeightStore()
        records = await store.write_pieces(VERSION, 0, _pieces((0, 4)))
        assert await store.versions() == []
        with pytest.raises(WeightsError, match="e0v3 do not exist"):
            await store.read_manifest(VERSION)
        await store.commit(build_manifest(VERSION, records))
        manifest: Manifest = await store.read_manifest(VERSION)
        whole = await store.read_tensor(VERSION, manifest.tensors["w"])
        assert torch.equal(whole, FULL)
        await store.drop(VERSION)
        assert await store.versions() == []
        with pytest.raises(WeightsError, match="piece .* of w is gone"):
            await store.read_tensor(VERSION, manifest.tensors["w"])

    asyncio.run(scenario())


def test_a_sample_verifies_every_tensor_once_in_eight_versions() -> None:
    names = [f"model.layers.{i}.weight" for i in range(40)]
    for name in names:
        turns = [is_verified(name, WeightsVersion(0, v), "sample") for v in range(100, 108)]
        assert sum(turns) == 1
    in_one = sum(is_verified(name, VERSION, "sample") for name in names)
    assert 0 < in_one < 20
    assert all(is_verified(name, VERSION, "full") for name in names)
    assert not any(is_verified(name, VERSION, "off") for name in names)


@pytest.mark.parametrize(("verify", "catches"), [("full", 8), ("sample", 1), ("off", 0)])
def test_a_flipped_byte_is_caught_as_often_as_is_asked_for(verify: Verify, catches: int) -> None:
    """In eight versions of one tensor; shapes and dtypes are compared in any case."""
    caught = 0
    for policy_version in range(8):
        version = WeightsVersion(0, policy_version)
        records = [record_piece(piece, "at0", version, verify) for piece in _pieces((0, 4))]
        entry = build_manifest(version, records).tensors["w"]
        damaged = FULL.clone()
        damaged.view(torch.uint8)[1, 5] ^= 1
        try:
            assemble(version, entry, [damaged])
        except WeightsError:
            caught += 1
        with pytest.raises(WeightsError, match="the manifest says"):
            assemble(version, entry, [FULL[:2]])
    assert caught == catches
