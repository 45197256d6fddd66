"""Keys and values of the rows that are sampled now, each as long as it is.

Row i of every buffer belongs to the i-th running row; a row that leaves is replaced by one of the
last. Buffers are as large as the longest row times the rows that there are, and go with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

ROUND_UP = 16
"""Positions come in these: kernels on GPUs want masks that are aligned."""
GROW_TOKENS = 64
"""Positions that a buffer grows by, at least."""


class Slots:
    """The cache that a model decodes with: one more token of every row at a time."""

    def __init__(self, config: PreTrainedConfig, *, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._num_slots = num_slots
        self._room = _Room(0, 0)
        self._next = _Next.of(np.zeros(0, np.int64), device)
        self.num_rows = 0
        self._layers = [_SlotLayer(self) for _ in DynamicCache(config=config).layers]
        self.cache = Cache(layers=list(self._layers))
        """What a forward pass is given, after `begin_step`."""

    @property
    def next(self) -> _Next:
        """Where the tokens of the step that has begun go."""
        return self._next

    def begin_step(
        self, lengths: NDArray[np.int64], *, limit: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Room for another token of every row; they have `lengths`, and none gets beyond `limit`.

        Returns:
            positions [R, 1] of those tokens, and a mask [R, 1, 1, T] in `dtype`: what is added to
            scores, minus infinity beyond a row's own tokens.
        """
        self._make_room(self.num_rows, int(lengths.max()) + 1, limit)
        self._next = _Next.of(lengths, self._device)
        positions_R1 = self._next.positions[:, None]
        later_RT = torch.arange(self._next.width, device=self._device)[None] > positions_R1
        mask_RT = torch.zeros(later_RT.shape, dtype=dtype, device=self._device)
        mask_RT.masked_fill_(later_RT, float("-inf"))
        return positions_R1, mask_RT[:, None, None]

    def append(self, prefilled: Cache, which: NDArray[np.int64], *, limit: int) -> None:
        """Further rows; each takes over the keys and values of a row of `prefilled`."""
        num_rows = self.num_rows + len(which)
        tokens = _states(prefilled.layers[0])[0].shape[2]
        self._make_room(num_rows, tokens, max(limit, tokens), like=prefilled)
        self.replace(np.arange(self.num_rows, num_rows), prefilled, which)
        self.num_rows = num_rows

    def replace(self, rows: NDArray[np.int64], prefilled: Cache, which: NDArray[np.int64]) -> None:
        """Other keys and values for `rows`: those of the rows `which` of `prefilled`."""
        into = torch.from_numpy(rows).to(self._device)
        source = torch.from_numpy(which).to(self._device)
        for layer, given in zip(self._layers, prefilled.layers, strict=True):
            for buffer, states in zip(_states(layer), _states(given), strict=True):
                # What a shorter row takes over of its padding is hidden by its length.
                buffer[into, :, : states.shape[2]] = states[source]

    def remove(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Let rows go; (from, to) of those that take their places."""
        gone, left = set(rows), self.num_rows - len(rows)
        holes = [row for row in sorted(gone) if row < left]
        movers = [row for row in range(left, self.num_rows) if row not in gone]
        self.num_rows = left
        if not left:
            self._room = _Room(0, 0)
            for layer in self._layers:
                layer.keys = layer.values = None
        elif holes:
            into = torch.tensor(holes, device=self._device)
            source = torch.tensor(movers, device=self._device)
            for layer in self._layers:
                for buffer in _states(layer):
                    buffer[into] = buffer[source]
        return list(zip(movers, holes, strict=True))

    def _make_room(self, rows: int, tokens: int, limit: int, like: Cache | None = None) -> None:
        """At least that much in every buffer, one layer after the other, so that the whole cache is
        never there twice. The first buffers are `like` others."""
        room = self._room
        if rows > room.rows:
            room = _Room(min(max(rows, room.rows * 3 // 2), self._num_slots), room.tokens)
        if tokens > room.tokens:
            more = min(tokens + max(GROW_TOKENS, tokens // 4), limit)
            room = _Room(room.rows, _rounded(max(tokens, more)))
        if room == self._room:
            return
        for index, layer in enumerate(self._layers):
            given = layer if layer.keys is not None or like is None else like.layers[index]
            layer.keys, layer.values = (
                _grown(buffer, room, states)
                for buffer, states in zip((layer.keys, layer.values), _states(given), strict=True)
            )
        self._room = room


@dataclass(frozen=True, slots=True)
class _Room:
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Next:
    """Where the next token of every row goes."""

    rows: Tensor
    positions: Tensor
    width: int
    """Positions that are looked at."""

    @classmethod
    def of(cls, lengths: NDArray[np.int64], device: torch.device) -> _Next:
        return cls(
            torch.arange(len(lengths), device=device),
            # A copy: the caller counts on.
            torch.from_numpy(lengths.copy()).to(device),
            _rounded(int(lengths.max(initial=0)) + 1),
        )


class _SlotLayer(DynamicLayer):
    """Keys and values of one layer, [rows, heads, tokens, size of a head]."""

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self._slots = slots

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one token of every row; all keys and values that there are."""
        where = self._slots.next
        keys, values = _states(self)
        keys[where.rows, :, where.positions] = key_states[:, :, 0]
        values[where.rows, :, where.positions] = value_states[:, :, 0]
        R, T = len(where.rows), where.width
        return keys[:R, :, :T], values[:R, :, :T]


def _states(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values


def _grown(buffer: Tensor | None, room: _Room, like: Tensor) -> Tensor:
    """Zero where nothing was: a masked score times a number that is none would be none."""
    grown = like.new_zeros(room.rows, like.shape[1], room.tokens, like.shape[3])
    if buffer is not None:
        grown[: buffer.shape[0], :, : buffer.shape[2]] = buffer
    return grown


def _rounded(tokens: int) -> int:
    return -(-tokens // ROUND_UP) * ROUND_UP
