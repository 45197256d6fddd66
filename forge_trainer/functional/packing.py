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

import torch
from torch import Tensor

from forge_trainer.errors import DataError
from forge_trainer.types import PER_TOKEN_FIELDS, TrainBatch, TrainSequence


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """How rows are cut."""

    max_row_tokens: int
    rows_per_microbatch: int
    pack: bool = True
    """False: one sequence per row."""
    pad_multiple: int = 1
    """T is rounded up to a multiple of this."""
    row_multiple: int = 1
    """B is rounded up to a multiple of this."""


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


def pack_sequences(
    sequences: Sequence[TrainSequence], *, dp_size: int, plan: PackingPlan
) -> PackedCall:
    """Validated sequences as microbatches for every data-parallel rank.

    Raises:
        DataError: a sequence is longer than a row.
    """
    rows = _fill_rows([len(s) for s in sequences], plan)
    rows_per_rank = -(-len(rows) // dp_size)
    B = _round_up(min(plan.rows_per_microbatch, rows_per_rank), plan.row_multiple)
    num_microbatches = -(-rows_per_rank // B)
    longest = max(sum(len(sequences[i]) for i in row) for row in rows)
    T = _round_up(longest, plan.pad_multiple)

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


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


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
