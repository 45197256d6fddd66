"""Manifests: a version is whole, or it is an error that says which."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from forge_trainer.errors import WeightsError
from forge_trainer.functional.pieces.manifests import (
    build_manifest,
    check_fits,
    checksum,
    is_verified,
    num_bytes_of,
    piece_checksum,
    require_checksums,
    tensors_of,
    ties_of,
)
from forge_trainer.functional.pieces.rectangles import any_overlap, overlap
from forge_trainer.pieces import Layout, Manifest, PieceRecord, RankPieces, Verify, WeightsVersion
from forge_trainer.weights.keys import (
    lease_key,
    manifest_key,
    mapping_key,
    pieces_prefix,
    tensor_key,
    version_of,
)
from forge_trainer.weights.staging import PackedPieces

VERSION = WeightsVersion(0, 3)
FULL = torch.arange(12.0).reshape(4, 3)


def _part(
    *row_ranges: tuple[int, int], dtype: str = "float32", tied: tuple[str, ...] = ()
) -> RankPieces:
    records = [
        PieceRecord("w", dtype, (4, 3), (start, 0), (end - start, 3), tied)
        for start, end in row_ranges
    ]
    tensors = [FULL[start:end] for start, end in row_ranges]
    checksums = tuple(
        piece_checksum(record, tensor, VERSION, "full")
        for record, tensor in zip(records, tensors, strict=True)
    )
    return RankPieces(Layout(tuple(records)).encoded, checksums, "here")


def _manifest(*parts: RankPieces) -> Manifest:
    return build_manifest(VERSION, "memory", parts)


def test_versions_are_ordered_by_epoch_first() -> None:
    assert WeightsVersion(0, 9) < WeightsVersion(1, 2) < WeightsVersion(1, 3)


def test_every_key_names_its_version() -> None:
    version = WeightsVersion(2, 17)
    assert pieces_prefix(version, 1) == "weights.e2v17.r1"
    # Users of torchstore know these two.
    assert tensor_key(version, "lm_head.weight") == "weights/e2v17/lm_head.weight"
    assert mapping_key(version) == "weights/e2v17/MAPPING"
    for key in (
        manifest_key(version),
        pieces_prefix(version, 0) + ".5f0c3a@trainer/0",
        lease_key(version, "5f0c", 3),
        str(version),
    ):
        assert version_of(key) == version
    with pytest.raises(ValueError, match="names no weights version"):
        version_of("weights.model")


def test_a_layout_comes_back_as_it_was() -> None:
    records = (
        PieceRecord("a", "bfloat16", (4, 3), (2, 0), (2, 3), ("b",)),
        PieceRecord("n", "int64", (), (), ()),
    )
    layout = Layout(records)
    assert Layout.decode(layout.encoded).records == records
    assert layout.num_bytes == 20
    assert [record.num_bytes for record in records] == [12, 8]


def test_a_manifest_knows_its_tensors_whatever_rank_wrote_them() -> None:
    manifest = _manifest(_part((2, 4)), _part((0, 2)))
    entry = tensors_of(manifest)["w"]
    assert [piece.record.offsets for piece in entry.pieces] == [(0, 0), (2, 0)]
    assert [(piece.part, piece.index) for piece in entry.pieces] == [(1, 0), (0, 0)]
    assert num_bytes_of(manifest) == 48


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
        _manifest(*(_part(rows) for rows in ranges))


def test_ranks_must_agree_on_a_tensor() -> None:
    for other in (_part((2, 4), dtype="bfloat16"), _part((2, 4), tied=("v",))):
        with pytest.raises(WeightsError, match="ranks disagree on w"):
            _manifest(_part((0, 2)), other)
    with pytest.raises(WeightsError, match="no rank wrote any tensor"):
        _manifest()


def test_what_rectangles_share() -> None:
    assert overlap((0, 0), (4, 3), (2, 1), (4, 1)) == ((2, 1), (2, 1))
    assert overlap((0, 0), (2, 3), (2, 0), (2, 3)) is None
    assert overlap((), (), (), ()) == ((), ())


def test_overlaps_are_found_among_slices_and_among_tiles() -> None:
    rows = [((i, 0), (1, 3)) for i in range(300)]
    assert not any_overlap(rows, (300, 3))
    assert any_overlap([*rows, ((7, 0), (1, 3))], (300, 3))
    tiles = [((i, j), (2, 2)) for i in (0, 2) for j in (0, 2)]
    assert not any_overlap(tiles, (4, 4))
    assert any_overlap([*tiles, ((1, 1), (1, 1))], (4, 4))
    # What is empty between two hides nothing.
    assert any_overlap([((0,), (4,)), ((2,), (0,)), ((3,), (3,))], (7,))


def test_a_flipped_byte_is_caught_with_version_and_tensor() -> None:
    manifest = _manifest(_part((0, 4)))
    (piece,) = tensors_of(manifest)["w"].pieces
    require_checksums(manifest, [piece], [FULL])
    damaged = FULL.clone()
    damaged.view(torch.uint8)[1, 5] ^= 1
    with pytest.raises(WeightsError, match="e0v3: checksum of w at"):
        require_checksums(manifest, [piece], [damaged])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_checksums_depend_on_values_not_on_strides(dtype: torch.dtype) -> None:
    tensor = FULL.to(dtype)
    assert checksum(tensor) == checksum(tensor.T.contiguous().T)
    assert checksum(tensor) != checksum(tensor + 1)
    assert checksum(torch.tensor(1.0, dtype=dtype)) == checksum(torch.tensor([1.0], dtype=dtype))


def test_a_reader_wants_exactly_its_own_tensors() -> None:
    manifest = _manifest(_part((0, 4)))
    check_fits(manifest, {"w": ((4, 3), "float32")})
    for expected, message in (
        ({"w": ((4, 3), "float32"), "b": ((4,), "float32")}, r"missing \['b'\]"),
        ({}, r"extra \['w'\]"),
        ({"w": ((3, 4), "float32")}, r"different \[.w is \(\(4, 3\)"),
        ({"w": ((4, 3), "bfloat16")}, "the model has"),
    ):
        with pytest.raises(WeightsError, match=f"e0v3 do not fit the model.*{message}"):
            check_fits(manifest, expected)


def test_a_tied_tensor_answers_to_all_its_names() -> None:
    manifest = _manifest(_part((0, 4), tied=("head",)))
    fact = ((4, 3), "float32")
    assert ties_of(manifest) == {"head": "w"}
    for names in (["w"], ["head"], ["w", "head"]):
        check_fits(manifest, dict.fromkeys(names, fact))
    with pytest.raises(WeightsError, match=r"missing \['other'\]"):
        check_fits(manifest, {"w": fact, "other": fact})


@pytest.mark.parametrize("updates_per_push", [1, 2, 8])
def test_a_sample_verifies_every_tensor_in_its_turn(updates_per_push: int) -> None:
    names = [f"model.layers.{i}.weight" for i in range(40)]
    versions = [WeightsVersion(0, updates_per_push * i) for i in range(200)]
    for name in names:
        turns = sum(is_verified(name, version, "sample") for version in versions)
        assert 8 < turns < 50
    assert all(is_verified(name, VERSION, "full") for name in names)
    assert not any(is_verified(name, VERSION, "off") for name in names)


@pytest.mark.parametrize(("verify", "catches"), [("full", 8), ("sample", 1), ("off", 0)])
def test_a_flipped_byte_is_caught_as_often_as_is_asked_for(verify: Verify, catches: int) -> None:
    """In eight versions of one tensor."""
    record = PieceRecord("w", "float32", (4, 3), (0, 0), (4, 3))
    damaged = FULL.clone()
    damaged.view(torch.uint8)[1, 5] ^= 1
    caught = 0
    for policy_version in range(8):
        version = WeightsVersion(0, policy_version)
        checksums = (piece_checksum(record, FULL, version, verify),)
        part = RankPieces(Layout((record,)).encoded, checksums, "here")
        manifest = dataclasses.replace(_manifest(part), version=version)
        (piece,) = tensors_of(manifest)["w"].pieces
        try:
            require_checksums(manifest, [piece], [damaged])
        except WeightsError:
            caught += 1
    assert caught == catches


def test_small_pieces_of_one_dtype_and_part_lie_side_by_side() -> None:
    def record(name: str, rows: int, dtype: str = "float32") -> PieceRecord:
        return PieceRecord(name, dtype, (rows, 2), (0, 0), (rows, 2))

    records = [record("a", 1), record("b", 2, "int64"), record("c", 3), record("d", 9)]
    records += [PieceRecord("e", "float32", (), (), ()), record("f", 1)]
    packed = PackedPieces(records, num_bytes=40, parts=[0, 0, 0, 0, 0, 1])
    # 8 + 24 bytes, 72 that are too many and go alone, 4, the other dtype, the other part.
    blocks = [block.indices for block in packed.blocks]
    assert blocks == [(0, 2), (3,), (4,), (1,), (5,)]
    for index, piece in enumerate(packed):
        piece.fill_(index)
    assert packed.blocks[0].numbers.tolist() == [0.0] * 2 + [2.0] * 6
    assert [(tuple(p.shape), p.dtype) for p in packed] == [
        (r.shape, r.torch_dtype) for r in records
    ]
