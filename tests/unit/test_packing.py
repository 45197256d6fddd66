"""Packing: nothing is lost, split or mixed, and bad data is named."""

from __future__ import annotations

import copy
import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_trainer.errors import DataError
from forge_trainer.functional.packing import (
    PackedCall,
    PackingPlan,
    pack_sequences,
    unpack_values,
)
from forge_trainer.functional.validation import pack_valid, validate_sequences
from forge_trainer.types import TrainSequence
from tests.data import random_sequences, same_numbers


def _of_lengths(*lengths: int) -> list[TrainSequence]:
    return [TrainSequence([1] * n, [0] + [1] * (n - 1)) for n in lengths]


def test_rows_of_the_documented_example() -> None:
    packed = pack_sequences(_of_lengths(5, 3, 4), dp_size=2, plan=PackingPlan(8, 4))
    (first,), (second,) = packed.batches
    assert first.document_ids_BT.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert second.document_ids_BT.tolist() == [[2, 2, 2, 2, -1, -1, -1, -1]]
    assert first.positions_BT.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert second.positions_BT.tolist() == [[0, 1, 2, 3, 0, 0, 0, 0]]


def test_a_rank_without_sequences_gets_padding_of_the_same_shape() -> None:
    packed = pack_sequences(_of_lengths(4), dp_size=3, plan=PackingPlan(8, 4))
    shapes = {batch.token_ids_BT.shape for batches in packed.batches for batch in batches}
    assert shapes == {torch.Size([1, 4])}
    assert [len(batches) for batches in packed.batches] == [1, 1, 1]
    assert not packed.batches[2][0].loss_mask_BT.any()


def test_without_packing_every_sequence_has_its_row() -> None:
    packed = pack_sequences(_of_lengths(2, 3, 1), dp_size=1, plan=PackingPlan(8, 8, pack=False))
    (batch,) = packed.batches[0]
    assert [len(set(row) - {-1}) for row in batch.document_ids_BT.tolist()] == [1, 1, 1]


def test_row_length_is_rounded_up_for_gpu_kernels() -> None:
    plan = PackingPlan(256, 1, pad_multiple=128)
    packed = pack_sequences(_of_lengths(129), dp_size=1, plan=plan)
    assert packed.batches[0][0].token_ids_BT.shape == (1, 256)


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    dp_size=st.integers(1, 4),
    rows=st.integers(1, 4),
    pack=st.booleans(),
)
def test_every_token_arrives_exactly_once(
    lengths: list[int], dp_size: int, rows: int, pack: bool
) -> None:
    sequences = [
        TrainSequence([100 * i + t for t in range(n)], [0] * n, advantages=[float(i)] * n)
        for i, n in enumerate(lengths)
    ]
    packed = pack_sequences(sequences, dp_size=dp_size, plan=PackingPlan(12, rows, pack=pack))
    assert len({len(batches) for batches in packed.batches}) == 1
    assert len({b.token_ids_BT.shape for own in packed.batches for b in own}) == 1
    tokens = [[b.token_ids_BT.double() for b in own] for own in packed.batches]
    found = unpack_values(packed.placements, tokens)
    assert same_numbers(found, [s.token_ids for s in sequences])
    documents = [b.document_ids_BT for own in packed.batches for b in own]
    assert sum(int((d >= 0).sum()) for d in documents) == sum(lengths)


@given(
    num_rows=st.integers(1, 70),
    dp_size=st.integers(1, 4),
    limit=st.integers(1, 16),
)
def test_fewer_than_one_padding_row_per_microbatch(num_rows: int, dp_size: int, limit: int) -> None:
    """9 rows with a limit of 8 were once computed as 16, and 22 with one of 16 as 32."""
    sequences = _of_lengths(*[4] * num_rows)
    packed = pack_sequences(sequences, dp_size=dp_size, plan=PackingPlan(4, limit))
    needed = -(-num_rows // dp_size)
    for rows in packed.ranks:
        num_microbatches, B, T = rows.shape
        assert (limit >= B, T) == (True, 4)
        assert num_microbatches == -(-needed // limit), "as few microbatches as may be"
        assert num_microbatches * B - needed < num_microbatches


def test_the_documented_shares() -> None:
    shapes = [
        pack_sequences(_of_lengths(*[4] * n), dp_size=1, plan=PackingPlan(4, limit)).ranks[0].shape
        for n, limit in [(9, 8), (22, 16), (33, 4)]
    ]
    assert shapes == [(2, 5, 4), (2, 11, 4), (9, 4, 4)]


def test_where_shapes_are_compiled_they_are_steady() -> None:
    """With packing one row length; without, at most four; never a single row."""
    rng = random.Random(0)
    found: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    for pack, shapes in found.items():
        plan = PackingPlan(96, 4, pack=pack, pad_multiple=8, steady_shapes=True)
        for _ in range(40):
            lengths = [rng.randint(1, rng.choice([5, 20, 96])) for _ in range(rng.randint(1, 9))]
            packed = pack_sequences(_of_lengths(*lengths), dp_size=2, plan=plan)
            shapes |= {rows.shape[1:] for rows in packed.ranks}
    assert {T for _, T in found[True]} == {96}
    assert {T for _, T in found[False]} == {16, 24, 48, 96}
    assert all(B >= 2 for shapes in found.values() for B, _ in shapes)
    # Who asks for single rows has memory for no more.
    single = PackingPlan(96, 1, steady_shapes=True)
    packed = pack_sequences(_of_lengths(90, 80, 5), dp_size=1, plan=single)
    assert packed.ranks[0].shape == (2, 1, 96)


_ARRAYS = TrainSequence(
    token_ids=np.array([1, 2, 3], np.int64),
    loss_mask=np.array([False, True, True]),
    advantages=np.array([0.0, 0.5, -1.5], np.float64),
    generator_logprobs=torch.tensor([0.0, -1.0, -2.0], dtype=torch.bfloat16),
    extra={"turn": np.array([0, 1, 1]), "score": [0.25, 0.5, 1]},
)
_LISTS = TrainSequence(
    token_ids=[1, 2, 3],
    loss_mask=[0, 1, 1],
    advantages=[0.0, 0.5, -1.5],
    generator_logprobs=[0.0, -1.0, -2.0],
    extra={"turn": (0, 1, 1), "score": torch.tensor([0.25, 0.5, 1.0])},
)


def _pack_valid(*sequences: TrainSequence, dp_size: int = 1) -> PackedCall:
    return pack_valid(
        sequences,
        dp_size=dp_size,
        plan=PackingPlan(8, 4),
        vocab_size=10,
        max_sequence_tokens=8,
    )


def test_arrays_tensors_and_lists_are_the_same_sequence() -> None:
    assert _ARRAYS == _LISTS
    assert dataclasses.replace(_LISTS, extra={}) != _ARRAYS
    (batch,), (other,) = _pack_valid(_ARRAYS).batches[0], _pack_valid(_LISTS).batches[0]
    for name in ("token_ids_BT", "loss_mask_BT", "advantages_BT", "generator_logprobs_BT"):
        one, two = getattr(batch, name), getattr(other, name)
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    assert batch.advantages_BT is not None
    assert batch.advantages_BT.tolist() == [[0.0, 0.5, -1.5]]
    assert batch.extra["turn"].dtype == other.extra["turn"].dtype == torch.int64
    assert batch.extra["score"].tolist() == [[0.25, 0.5, 1.0]]


def test_extra_columns_have_one_dtype_on_all_ranks_and_follow_rows() -> None:
    whole, broken = (
        TrainSequence([1] * n, [0] * n, extra={"x": values})
        for n, values in ((5, [1, 2, 3, 4, 5]), (4, [0.5] * 4))
    )
    packed = _pack_valid(whole, broken, dp_size=3)
    batches = [batch for (batch,) in packed.batches]
    assert {batch.extra["x"].dtype for batch in batches} == {torch.float32}
    assert batches[0].extra["x"].tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0]]
    chosen = batches[1].select_rows(torch.tensor([0, 0]))
    assert chosen.extra["x"].tolist() == [[0.5, 0.5, 0.5, 0.5, 0.0]] * 2


def test_the_callers_sequences_stay_as_they_are() -> None:
    before = copy.deepcopy(_ARRAYS)
    packed = _pack_valid(_ARRAYS, _LISTS)
    for rows in packed.ranks:
        for column in rows.columns.arrays().values():
            column[...] = 1
    assert before == _ARRAYS == _LISTS


def _with(**changes: object) -> TrainSequence:
    good = TrainSequence([1, 2, 3], [0, 1, 1], advantages=[0.0, 1.0, 1.0])
    return dataclasses.replace(good, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (_with(loss_mask=[0, 1]), "'loss_mask' has 2 values for 3 tokens"),
        (_with(advantages=[0.0]), "'advantages' has 1 values for 3 tokens"),
        (_with(loss_mask=[1, 1, 1]), "marks the first token"),
        (_with(loss_mask=[0, 2, 1]), "other than 0 and 1"),
        (
            _with(token_ids=[1, 2, 10]),
            r"token id 10 at index 2 is outside the vocabulary \[0, 10\)",
        ),
        (_with(token_ids=[1, -1, 3]), "token id -1 at index 1"),
        (_with(token_ids=[1.0, 2.0, 3.0]), "must be integers"),
        (_with(advantages=[0.0, math.nan, 1.0]), "'advantages' is nan at index 1"),
        (_with(advantages=[0.0, 1.0, math.inf]), "'advantages' is inf at index 2"),
        (_with(temperature=0.0), "temperature is 0.0"),
        (TrainSequence([1] * 9, [0] * 9), "has 9 tokens; the trainer allows 8"),
        (TrainSequence([], []), "has no tokens"),
    ],
)
def test_bad_sequences_are_named(sequence: TrainSequence, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        validate_sequences([_with(), sequence], vocab_size=10, max_sequence_tokens=8)
    assert str(caught.value).startswith("sequence 1: ")
    with pytest.raises(DataError, match=message) as packing:
        _pack_valid(_with(), sequence)
    assert str(packing.value) == str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": [[0], [1], [1]]}, "'loss_mask' must be a flat list"),
        ({"loss_mask": [0.0, 0.5, 1.0]}, "other than 0 and 1"),
        ({"loss_mask": 3}, "'loss_mask' must be a flat list"),
        ({"token_ids": [1, "2", 3]}, "'token_ids' must be a flat list of numbers"),
        ({"token_ids": [1, 2, 2**32 + 1]}, "token id 4294967297 at index 2 is outside"),
        ({"token_ids": np.array([1, 2, 2**63], np.uint64)}, "is outside the vocabulary"),
        ({"token_ids": [True, True, True]}, "must be integers"),
        ({"advantages": [0.0, 1e300, 0.0]}, "finite in float32"),
        ({"advantages": [0.0, 1.0, 1.0, 1.0]}, "has 4 values for 3 tokens"),
        ({"advantages": [0.0, None, 0.0]}, "'advantages' must be a flat list"),
        ({"temperature": math.nan}, "'temperature' is nan"),
        ({"temperature": "hot"}, "'temperature' must be a flat list of numbers"),
        ({"extra": {"x": [1.0, 2.0]}}, r"extra\['x'\].* has 2 values for 3 tokens"),
        ({"extra": {"x": [1.0, math.inf, 2.0]}}, r"extra\['x'\].* is inf at index 1"),
        ({"extra": {"y": [1, 2, 3]}}, r"extra has \['y'\], that of sequence 0 has \['x'\]"),
    ],
)
def test_what_packing_refuses_is_named(changes: dict[str, object], message: str) -> None:
    """Checks of joined columns must miss nothing that a look at every sequence would find."""
    good = _with(extra={"x": [1, 2, 3]})
    bad = dataclasses.replace(good, **changes)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message) as caught:
        _pack_valid(good, bad)
    assert str(caught.value).startswith("sequence 1: ")


def test_lengths_that_cancel_out_are_still_refused() -> None:
    """One column a token too long and the next a token too short have the right sum."""
    long, short = _with(advantages=[0.0] * 4), _with(advantages=[0.0] * 2)
    with pytest.raises(DataError, match="sequence 0: 'advantages' has 4 values for 3 tokens"):
        _pack_valid(long, short)


def test_an_empty_batch_is_an_error() -> None:
    with pytest.raises(DataError, match="batch is empty"):
        validate_sequences([], vocab_size=10, max_sequence_tokens=8)


def test_a_field_must_be_given_for_all_or_none() -> None:
    mixed = [_with(), _with(advantages=None)]
    with pytest.raises(DataError, match="sequence 1: 'advantages' is missing but others"):
        validate_sequences(mixed, vocab_size=10, max_sequence_tokens=8)
    with pytest.raises(DataError, match="sequence 0: the loss needs 'ref_logprobs'"):
        validate_sequences(
            [_with()], vocab_size=10, max_sequence_tokens=8, required_fields=["ref_logprobs"]
        )


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(DataError, match="sequence 1 has 9 tokens, a row holds 8"):
        pack_sequences(_of_lengths(3, 9), dp_size=1, plan=PackingPlan(8, 1))


def test_random_test_data_is_valid() -> None:
    validate_sequences(random_sequences(), vocab_size=260, max_sequence_tokens=20)
