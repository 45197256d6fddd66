"""Packing: the one border between ragged lists and tensors.

Sequences become rows of whole documents, rows become microbatches, and every data-parallel rank
gets the same number of microbatches of one common shape [B, T]. Where rows run out, a rank gets
padding rows with an all-zero mask, so that all ranks take part in every collective.

Example: lengths 5, 3, 4 with max_row_tokens 8 on 2 ranks
    rows [5+3], [4]  ->  rank 0: [[0 0 0 0 0 1 1 1]]   rank 1: [[2 2 2 2 - - - -]]   (document ids)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forge_trainer.errors import DataError
from forge_trainer.types import PER_TOKEN_FIELDS, TrainBatch, TrainSequence

MIN_TEMPERATURE = 1e-3
"""Below it, logits divided by it are no longer numbers that float32 can tell apart."""


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """How rows are cut."""

    max_row_tokens: int
    rows_per_microbatch: int
    pack: bool = True
    """False: one sequence per row."""
    pad_multiple: int = 1
    """T is rounded up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sequence went."""

    dp_rank: int
    microbatch: int
    row: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PackedCall:
    batches: list[list[TrainBatch]]
    """Indexed by data-parallel rank, then microbatch."""
    placements: list[Placement]
    """Indexed by sequence."""


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


def pack_sequences(
    sequences: Sequence[TrainSequence], *, dp_size: int, plan: PackingPlan
) -> PackedCall:
    """Validated sequences as microbatches for every data-parallel rank.

    Raises:
        DataError: a sequence is longer than a row.
    """
    rows = _fill_rows([len(s) for s in sequences], plan)
    rows_per_rank = -(-len(rows) // dp_size)
    B = min(plan.rows_per_microbatch, rows_per_rank)
    num_microbatches = -(-rows_per_rank // B)
    longest = max(sum(len(sequences[i]) for i in row) for row in rows)
    T = -(-longest // plan.pad_multiple) * plan.pad_multiple

    batches, placements = [], {}
    for dp_rank in range(dp_size):
        own_rows = rows[dp_rank::dp_size]
        own_rows += [[]] * (num_microbatches * B - len(own_rows))
        rank_batches = []
        for microbatch in range(num_microbatches):
            chosen = own_rows[microbatch * B : (microbatch + 1) * B]
            rank_batches.append(_build_batch(sequences, chosen, T))
            for row, indices in enumerate(chosen):
                start = 0
                for i in indices:
                    length = len(sequences[i])
                    placements[i] = Placement(dp_rank, microbatch, row, start, length)
                    start += length
        batches.append(rank_batches)
    return PackedCall(batches, [placements[i] for i in range(len(sequences))])


def unpack_values(
    placements: Sequence[Placement], values_BT: Sequence[Sequence[Tensor]]
) -> list[list[float]]:
    """Per-sequence lists from tensors [B, T], one per data-parallel rank and microbatch."""
    return [
        values_BT[p.dp_rank][p.microbatch][p.row, p.start : p.start + p.length].tolist()
        for p in placements
    ]


def _fill_rows(lengths: Sequence[int], plan: PackingPlan) -> list[list[int]]:
    """Sequence indices of each row, first-fit decreasing; the order is a function of the lengths.

    Rows come out longest first, so dealing them out one by one balances the ranks.
    """
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if lengths[by_length[0]] > plan.max_row_tokens:
        raise DataError(
            f"sequence {by_length[0]} has {lengths[by_length[0]]} tokens, a row holds "
            f"{plan.max_row_tokens}; raise trainer.packing.max_row_tokens"
        )
    rows: list[list[int]] = []
    free: list[int] = []
    for i in by_length:
        fits = (r for r, space in enumerate(free) if space >= lengths[i])
        row = next(fits, None) if plan.pack else None
        if row is None:
            rows.append([i])
            free.append(plan.max_row_tokens - lengths[i])
        else:
            rows[row].append(i)
            free[row] -= lengths[i]
    return rows


def _build_batch(sequences: Sequence[TrainSequence], rows: list[list[int]], T: int) -> TrainBatch:
    B = len(rows)
    token_ids = torch.zeros(B, T, dtype=torch.int64)
    positions = torch.zeros(B, T, dtype=torch.int64)
    document_ids = torch.full((B, T), -1, dtype=torch.int64)
    loss_mask = torch.zeros(B, T, dtype=torch.bool)
    temperatures = torch.ones(B, T)
    given = [name for name in PER_TOKEN_FIELDS if getattr(sequences[0], name) is not None]
    fields = {name: torch.zeros(B, T) for name in given}
    for row, indices in enumerate(rows):
        start = 0
        for i in indices:
            sequence = sequences[i]
            at = (row, slice(start, start + len(sequence)))
            token_ids[at] = torch.as_tensor(sequence.token_ids, dtype=torch.int64)
            positions[at] = torch.arange(len(sequence))
            document_ids[at] = i
            loss_mask[at] = torch.as_tensor(sequence.loss_mask).bool()
            temperatures[at] = sequence.temperature
            for name, tensor in fields.items():
                tensor[at] = torch.as_tensor(getattr(sequence, name), dtype=torch.float32)
            start += len(sequence)
    optional = {f"{name}_BT": tensor for name, tensor in fields.items()}
    return TrainBatch(token_ids, positions, document_ids, loss_mask, temperatures, **optional)
