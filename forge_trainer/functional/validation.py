"""Checks on train sequences: everything that a rank would otherwise stumble over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_trainer.errors import DataError
from forge_trainer.types import PER_TOKEN_FIELDS, TrainSequence
from forge_trainer.types.arrays import as_array

from .packing import PackedCall, PackedRows, PackingPlan, pack_sequences

MIN_TEMPERATURE = 1e-3
"""Below it, logits divided by it are no longer numbers that float32 can tell apart."""


def pack_valid(
    sequences: Sequence[TrainSequence],
    *,
    dp_size: int,
    plan: PackingPlan,
    vocab_size: int,
    max_sequence_tokens: int,
    required_fields: Sequence[str] = (),
) -> PackedCall:
    """Sequences as microbatches, see `pack_sequences`, if they pass `validate_sequences`.

    Joined values are checked, a column at a time; only where something is wrong does every
    sequence get a look of its own.

    Raises:
        DataError: names the sequence, the field, what was found and what is wanted.
    """
    limits = {"vocab_size": vocab_size, "max_sequence_tokens": max_sequence_tokens}
    try:
        _require_same_fields(sequences, required_fields)
        _require_same_lengths(sequences)
        packed = pack_sequences(sequences, dp_size=dp_size, plan=plan)
        for rows in packed.ranks:
            _require_valid(rows, vocab_size, max_sequence_tokens)
    except Exception:
        validate_sequences(sequences, **limits, required_fields=required_fields)
        raise
    return packed


def _require_same_lengths(sequences: Sequence[TrainSequence]) -> None:
    """Raises ValueError if a column is longer or shorter than the tokens it belongs to."""
    for sequence in sequences:
        wanted = len(sequence.token_ids)
        given = (getattr(sequence, name) for name in PER_TOKEN_FIELDS)
        columns = [sequence.loss_mask, *sequence.extra.values(), *given]
        if any(len(column) != wanted for column in columns if column is not None):
            raise ValueError("columns of different lengths")


def _require_valid(rows: PackedRows, vocab_size: int, max_sequence_tokens: int) -> None:
    """Raises ValueError if `validate_sequences` would refuse one of them."""
    columns, lengths = rows.columns.arrays(), rows.lengths
    if lengths.size == 0:
        return
    ends = lengths.cumsum()
    is_valid = (
        0 < lengths.min() <= lengths.max() <= max_sequence_tokens
        and 0 <= columns["token_ids"].min() <= columns["token_ids"].max() < vocab_size
        and not columns["loss_mask"][ends - lengths].any()
        and np.isfinite(rows.temperatures).all()
        and rows.temperatures.min() >= np.float32(MIN_TEMPERATURE)
    )
    if not is_valid:
        raise ValueError("not valid")


def _require_same_fields(sequences: Sequence[TrainSequence], required: Sequence[str]) -> None:
    """Raises DataError unless every field is given for all sequences or for none."""
    for name in PER_TOKEN_FIELDS:
        missing = [i for i, s in enumerate(sequences) if getattr(s, name) is None]
        if name in required and missing:
            raise DataError(f"sequence {missing[0]}: the loss needs {name!r}, which is missing")
        if missing and len(missing) < len(sequences):
            raise DataError(
                f"sequence {missing[0]}: {name!r} is missing but others of the call have it; "
                "give it for all or for none"
            )
    wanted = sequences[0].extra.keys()
    for index, sequence in enumerate(sequences):
        if sequence.extra.keys() != wanted:
            raise DataError(
                f"sequence {index}: extra has {sorted(sequence.extra)}, that of sequence 0 has "
                f"{sorted(wanted)}; give the same columns for all"
            )


def validate_sequences(
    sequences: Sequence[TrainSequence],
    *,
    vocab_size: int,
    max_sequence_tokens: int,
    required_fields: Sequence[str] = (),
) -> None:
    """Check everything that a rank would otherwise stumble over, one sequence after another.

    Raises:
        DataError: names the sequence, the field, what was found and what is wanted.
    """
    if not sequences:
        raise DataError("the batch is empty; give at least one TrainSequence")
    for index, sequence in enumerate(sequences):
        try:
            _validate_sequence(sequence, vocab_size, max_sequence_tokens)
        except DataError as error:
            raise DataError(f"sequence {index}: {error}") from None
    _require_same_fields(sequences, required_fields)


def _validate_sequence(sequence: TrainSequence, vocab_size: int, max_tokens: int) -> None:
    if not isinstance(sequence, TrainSequence):
        raise DataError(f"is a {type(sequence).__name__}; give TrainSequence")
    ids = _flat("token_ids", sequence.token_ids)
    if ids.size == 0:
        raise DataError("has no tokens")
    if ids.size > max_tokens:
        raise DataError(f"has {ids.size} tokens; the trainer allows {max_tokens}")
    _validate_ids(ids, vocab_size)
    _validate_mask(_flat("loss_mask", sequence.loss_mask, ids.size))
    for name in PER_TOKEN_FIELDS:
        values = getattr(sequence, name)
        if values is not None:
            _require_float32(name, _flat(name, values, ids.size))
    for name, values in sequence.extra.items():
        _require_float32(f"extra[{name!r}]", _flat(f"extra[{name!r}]", values, ids.size))
    temperature = _flat("temperature", [sequence.temperature])
    _require_float32("temperature", temperature)
    if not temperature[0] >= MIN_TEMPERATURE:
        raise DataError(
            f"temperature is {sequence.temperature}; it must be at least {MIN_TEMPERATURE}"
        )


def _flat(name: str, values: Any, length: int | None = None) -> NDArray[Any]:
    """The numbers of a per-token field as a one-dimensional array."""
    try:
        array = as_array(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name!r} is no list of numbers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biuf"):
        raise DataError(
            f"{name!r} must be a flat list of numbers, got {type(values).__name__} of shape "
            f"{array.shape} and type {array.dtype}"
        )
    if length is not None and array.size != length:
        raise DataError(f"{name!r} has {array.size} values for {length} tokens")
    return array


def _validate_ids(ids: NDArray[Any], vocab_size: int) -> None:
    if ids.dtype.kind not in "iu":
        raise DataError(f"token ids must be integers, got {ids.dtype}")
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        at = int(outside[0])
        raise DataError(
            f"token id {ids[at]} at index {at} is outside the vocabulary [0, {vocab_size})"
        )


def _validate_mask(mask: NDArray[Any]) -> None:
    if not np.isin(mask, (0, 1)).all():
        raise DataError(
            "loss_mask holds values other than 0 and 1; scale tokens with token_weights"
        )
    if mask[0]:
        raise DataError(
            "loss_mask marks the first token, which nothing predicts; set loss_mask[0] = 0"
        )


def _require_float32(name: str, values: NDArray[Any]) -> None:
    with np.errstate(over="ignore"):
        bad = np.flatnonzero(~np.isfinite(values.astype(np.float32)))
    if bad.size:
        at = int(bad[0])
        raise DataError(f"{name!r} is {values[at]} at index {at}; it must be finite in float32")
