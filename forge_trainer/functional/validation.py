"""Checks on train sequences: everything that a rank would otherwise stumble over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forge_trainer.errors import DataError
from forge_trainer.types import PER_TOKEN_FIELDS, TrainSequence

MIN_TEMPERATURE = 1e-3
"""Below it, logits divided by it are no longer numbers that float32 can tell apart."""


def validate_sequences(
    sequences: Sequence[TrainSequence],
    *,
    vocab_size: int,
    max_sequence_tokens: int,
    required_fields: Sequence[str] = (),
) -> None:
    """Check everything that a rank would otherwise stumble over.

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
    for name in PER_TOKEN_FIELDS:
        missing = [i for i, s in enumerate(sequences) if getattr(s, name) is None]
        if name in required_fields and missing:
            raise DataError(f"sequence {missing[0]}: the loss needs {name!r}, which is missing")
        if missing and len(missing) < len(sequences):
            raise DataError(
                f"sequence {missing[0]}: {name!r} is missing but others of the call have it; "
                "give it for all or for none"
            )


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
    temperature = _flat("temperature", [sequence.temperature])
    _require_float32("temperature", temperature)
    if not temperature[0] >= MIN_TEMPERATURE:
        raise DataError(
            f"temperature is {sequence.temperature}; it must be at least {MIN_TEMPERATURE}"
        )


def _flat(name: str, values: Any, length: int | None = None) -> NDArray[Any]:
    """The numbers of a per-token field as a one-dimensional array."""
    try:
        array = np.asarray(values.detach().cpu().float() if _is_float_tensor(values) else values)
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


def _is_float_tensor(values: Any) -> bool:
    return isinstance(values, Tensor) and values.is_floating_point()


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
