"""Packing: the one border between ragged sequences and tensors.

Sequences become rows of whole documents, rows become microbatches, and every data-parallel rank
gets the same number of microbatches of one common shape [B, T]. Where rows run out, a rank gets
padding rows with an all-zero mask, so that all ranks take part in every collective; there are
fewer of them than microbatches.

The controller only joins what it was given and says what goes where (`PackedRows`); a rank makes
the tensors of that (`PackedRows.batches`).

Example: lengths 5, 3, 4 with max_row_tokens 8 on 2 ranks
    rows [5+3], [4]  ->  rank 0: [[0 0 0 0 0 1 1 1]]   rank 1: [[2 2 2 2 - - - -]]   (document ids)
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forge_trainer.errors import DataError
from forge_trainer.types import PER_TOKEN_FIELDS, TrainBatch, TrainSequence

from .columns import Columns, join, whole_or_float

EXTRA = "extra."
"""Before the name of a column that is a sequence's own."""
ROW_BUCKETS = 4
"""Row lengths that occur without packing, where shapes are steady; each half of the next."""


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """How rows are cut."""

    max_row_tokens: int
    rows_per_microbatch: int
    """At most so many."""
    pack: bool = True
    """False: one sequence per row."""
    pad_multiple: int = 1
    """T is rounded up to a multiple of this."""
    row_multiple: int = 1
    """B is rounded up to a multiple of this."""
    steady_shapes: bool = False
    """True where a new shape is compiled anew: T is `max_row_tokens`, or without packing one of a
    few, and B is at least 2, since a compiler treats 1 as another case; unless it is always 1."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sequence went."""

    dp_rank: int
    microbatch: int
    row: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """What one data-parallel rank gets of a call: its tokens end to end, and where they belong."""

    shape: tuple[int, int, int]
    """Microbatches, B, T."""
    indices: NDArray[np.int64]
    """Of every sequence, its index in the call: the document ids."""
    lengths: NDArray[np.int64]
    """Of every sequence, its tokens."""
    starts: NDArray[np.int64]
    """Of every sequence, where its first token lies in the flattened shape."""
    temperatures: NDArray[np.float32]
    """Of every sequence."""
    columns: Columns
    """`token_ids` (int32), `loss_mask` (bool), the fields that are given (float32), and under
    `extra.NAME` the sequences' own (float32 or int64)."""

    def batches(self) -> list[TrainBatch]:
        """The microbatches, on the CPU."""
        lengths = torch.from_numpy(self.lengths)
        within = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(
            lengths
        )
        where = torch.from_numpy(self.starts).repeat_interleave(lengths) + within

        def spread(values: Tensor, fill: int = 0) -> Tensor:
            """Values by token as [microbatches, B, T]."""
            flat = torch.full((int(np.prod(self.shape)),), fill, dtype=values.dtype)
            flat[where] = values
            return flat.view(self.shape)

        def per_sequence(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values).repeat_interleave(lengths)

        columns = {name: torch.from_numpy(v) for name, v in self.columns.arrays().items()}
        own = [name for name in columns if name.startswith(EXTRA)]
        extra = {name.removeprefix(EXTRA): spread(columns.pop(name)) for name in own}
        made = {
            "token_ids_BT": spread(columns.pop("token_ids").long()),
            "positions_BT": spread(within),
            "document_ids_BT": spread(per_sequence(self.indices), -1),
            "temperatures_BT": spread(per_sequence(self.temperatures), 1),
            **{f"{name}_BT": spread(values) for name, values in columns.items()},
        }
        return [
            TrainBatch(
                **{name: tensor[i] for name, tensor in made.items()},
                extra={name: tensor[i] for name, tensor in extra.items()},
            )
            for i in range(self.shape[0])
        ]


@dataclass(frozen=True, slots=True, eq=False)
class PackedCall:
    ranks: list[PackedRows]
    """Indexed by data-parallel rank."""
    placements: list[Placement]
    """Indexed by sequence."""

    @property
    def batches(self) -> list[list[TrainBatch]]:
        """Indexed by data-parallel rank, then microbatch."""
        return [rows.batches() for rows in self.ranks]


def pack_sequences(
    sequences: Sequence[TrainSequence], *, dp_size: int, plan: PackingPlan
) -> PackedCall:
    """Validated sequences as microbatches for every data-parallel rank.

    Raises:
        DataError: a sequence is longer than a row.
        ValueError, TypeError, KeyError: sequences that `validate_sequences` refuses.
    """
    lengths = [len(sequence) for sequence in sequences]
    rows = _fill_rows(lengths, plan)
    num_microbatches, B = _share(-(-len(rows) // dp_size), plan)
    T = _row_tokens(max(sum(lengths[i] for i in row) for row in rows), plan)
    dtypes = _column_dtypes(sequences)
    placements: dict[int, Placement] = {}
    ranks = []
    for dp_rank in range(dp_size):
        # Dealt out to microbatches as they are to ranks, so that none gets all the long ones.
        own = rows[dp_rank::dp_size]
        chosen: list[int] = []
        for number, row in enumerate(own):
            microbatch, at = number % num_microbatches, number // num_microbatches
            start = 0
            for i in row:
                placements[i] = Placement(dp_rank, microbatch, at, start, lengths[i])
                start += lengths[i]
            chosen += row
        shape = (num_microbatches, B, T)
        places = [placements[i] for i in chosen]
        ranks.append(_join(sequences, chosen, places, shape, dtypes))
    return PackedCall(ranks, [placements[i] for i in range(len(sequences))])


def _share(rows_per_rank: int, plan: PackingPlan) -> tuple[int, int]:
    """(microbatches, B): as few microbatches as may be, all of one height.

    Example: 9 rows, at most 8 at a time -> 2 microbatches of 5 rows, one of them padding
    """
    num_microbatches = -(-rows_per_rank // plan.rows_per_microbatch)
    B = _round_up(-(-rows_per_rank // num_microbatches), plan.row_multiple)
    if plan.steady_shapes and plan.rows_per_microbatch > 1:
        B = max(B, 2)
    return num_microbatches, B


def _row_tokens(longest: int, plan: PackingPlan) -> int:
    if not plan.steady_shapes:
        return _round_up(longest, plan.pad_multiple)
    buckets = [plan.max_row_tokens]
    while not plan.pack and len(buckets) < ROW_BUCKETS:
        buckets.append(-(-buckets[-1] // 2))
    return _round_up(min(size for size in buckets if size >= longest), plan.pad_multiple)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def unpack_values(
    placements: Sequence[Placement], values_BT: Sequence[Sequence[Tensor]]
) -> list[NDArray[Any]]:
    """Per-sequence arrays from tensors [B, T], one per data-parallel rank and microbatch."""
    arrays = [[tensor.numpy() for tensor in own] for own in values_BT]
    return [
        arrays[p.dp_rank][p.microbatch][p.row, p.start : p.start + p.length].copy()
        for p in placements
    ]


def _fill_rows(lengths: Sequence[int], plan: PackingPlan) -> list[list[int]]:
    """Sequence indices of each row, best-fit decreasing; the order is a function of the lengths.

    Rows come out longest first, so dealing them out one by one balances the ranks.
    """
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if lengths[by_length[0]] > plan.max_row_tokens:
        raise DataError(
            f"sequence {by_length[0]} has {lengths[by_length[0]]} tokens, a row holds "
            f"{plan.max_row_tokens}; raise trainer.packing.max_row_tokens"
        )
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []
    """(tokens that a row has room for, the row), sorted; rows that are full are left out."""
    for i in by_length:
        at = bisect.bisect_left(free, (lengths[i], 0)) if plan.pack else len(free)
        if at == len(free):
            room, row = plan.max_row_tokens, len(rows)
            rows.append([])
        else:
            room, row = free.pop(at)
        rows[row].append(i)
        if plan.pack and room > lengths[i]:
            bisect.insort(free, (room - lengths[i], row))
    return rows


def _join(
    sequences: Sequence[TrainSequence],
    chosen: Sequence[int],
    places: Sequence[Placement],
    shape: tuple[int, int, int],
    dtypes: Mapping[str, Any],
) -> PackedRows:
    """The chosen sequences end to end."""
    _, B, T = shape
    own = [sequences[i] for i in chosen]
    lengths = [place.length for place in places]
    columns = Columns.empty(sum(lengths), dtypes)
    for name, out in columns.arrays().items():
        join(out, [_column(sequence, name) for sequence in own])
    starts = [(p.microbatch * B + p.row) * T + p.start for p in places]
    return PackedRows(
        shape=shape,
        indices=np.array(chosen, np.int64),
        lengths=np.array(lengths, np.int64),
        starts=np.array(starts, np.int64),
        temperatures=np.array([s.temperature for s in own], np.float32),
        columns=columns,
    )


def _column_dtypes(sequences: Sequence[TrainSequence]) -> dict[str, Any]:
    """Of the columns that all sequences have, the same on all ranks."""
    fields = [name for name in PER_TOKEN_FIELDS if getattr(sequences[0], name) is not None]
    extra = {
        EXTRA + name: whole_or_float([s.extra[name] for s in sequences])
        for name in sequences[0].extra
    }
    return {
        "token_ids": np.int32,
        "loss_mask": np.bool_,
        **dict.fromkeys(fields, np.float32),
    } | extra


def _column(sequence: TrainSequence, name: str) -> Any:
    if name.startswith(EXTRA):
        return sequence.extra[name.removeprefix(EXTRA)]
    return getattr(sequence, name)
