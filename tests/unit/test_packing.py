"""Packing: nothing is lost, split or mixed, and bad data is named."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_trainer.errors import DataError
from forge_trainer.functional.packing import (
    PackingPlan,
    pack_sequences,
    unpack_values,
)
from forge_trainer.functional.validation import validate_sequences
from forge_trainer.types import TrainSequence
from tests.data import random_sequences


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
    assert unpack_values(packed.placements, tokens) == [list(s.token_ids) for s in sequences]
    documents = [b.document_ids_BT for own in packed.batches for b in own]
    assert sum(int((d >= 0).sum()) for d in documents) == sum(lengths)


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
