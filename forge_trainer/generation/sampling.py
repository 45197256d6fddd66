"""Drawing tokens from logits: two numbers per token stay, and no copy of the logits is made.

Pure functions of tensors. No requests here, and no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 256
"""Neighbouring tokens whose probabilities are summed first."""
SMALLEST_TILE = 2**15
TILES = 16
"""Scratch memory is the logits' own, divided by this, or `SMALLEST_TILE` numbers."""


@dataclass(frozen=True, slots=True)
class Draws:
    """S tokens that are wanted; several may come from one row of logits."""

    rows_S: Int[Tensor, " S"]
    """Whose logits, int64."""
    uniforms_S: Float[Tensor, " S"]
    """Random numbers in [0, 1), float64."""
    greedy_S: Bool[Tensor, " S"]
    """The likeliest token instead."""


@torch.no_grad()
def draw_tokens(
    logits_RV: Float[Tensor, "R V"], temperatures_R: Float[Tensor, " R"], draws: Draws
) -> tuple[Int[Tensor, " S"], Float[Tensor, " S"]]:
    """Tokens of softmax(logits / temperature), and their log-probs in nats, float32.

    Inverse transform sampling: the first token at which the cumulative probability exceeds the
    random number, found by blocks and then within one, with sums in float64. A token of
    probability 0 is never drawn. Logits that are not finite give a log-prob that is not finite.

    Example:
        logits [0, log 3], temperature 1 -> probabilities [1/4, 3/4]
        random number 0.2 -> token 0, 0.25 -> token 1, both log-probs log 1/4 and log 3/4
    """
    V = logits_RV.shape[1]
    peaks_R = logits_RV.amax(-1).float()
    sums_RN = _block_sums(logits_RV, peaks_R, temperatures_R)
    rows_S = draws.rows_S
    upto_SN = sums_RN.cumsum(-1)[rows_S]
    totals_S = upto_SN[:, -1]
    wanted_S = draws.uniforms_S * totals_S
    blocks_S = _first_above(upto_SN, wanted_S)
    before_S = upto_SN.gather(1, (blocks_S - 1).clamp(min=0)[:, None]).squeeze(1)
    before_S = torch.where(blocks_S > 0, before_S, torch.zeros_like(before_S))
    tokens_SK = blocks_S[:, None] * BLOCK + torch.arange(BLOCK, device=rows_S.device)
    logits_SK = logits_RV[rows_S[:, None], tokens_SK.clamp(max=V - 1)]
    weights_SK = _scaled(logits_SK, peaks_R[rows_S], temperatures_R[rows_S]).exp_()
    weights_SK.masked_fill_(tokens_SK >= V, 0.0)
    within_S = _first_above(weights_SK.double().cumsum(-1), wanted_S - before_S)
    tokens_S = blocks_S * BLOCK + within_S
    if bool(draws.greedy_S.any()):
        tokens_S = torch.where(draws.greedy_S, logits_RV.argmax(-1)[rows_S], tokens_S)
    chosen_S1 = logits_RV[rows_S, tokens_S][:, None]
    scaled_S1 = _scaled(chosen_S1, peaks_R[rows_S], temperatures_R[rows_S])
    return tokens_S, (scaled_S1.squeeze(1).double() - totals_S.log()).float()


def _first_above(upto_SN: Tensor, wanted_S: Tensor) -> Tensor:
    """Index of the first sum above `wanted`; where rounding leaves none, of the last that grew."""
    first_S = (upto_SN <= wanted_S[:, None]).sum(-1)
    last_S = (upto_SN < upto_SN[:, -1:]).sum(-1)
    return torch.minimum(first_S, last_S)


def _scaled(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """(logits - peak) / temperature in float32, a new tensor."""
    return logits.float().sub(peaks[:, None]).div_(temperatures[:, None])


def _block_sums(logits_RV: Tensor, peaks_R: Tensor, temperatures_R: Tensor) -> Tensor:
    """[R, V / BLOCK] sums of exp((logits - peak) / temperature), float64."""
    R, V = logits_RV.shape
    sums_RN = logits_RV.new_empty(R, -(-V // BLOCK), dtype=torch.float64)
    for rows, columns in _tiles(R, V):
        tile = _scaled(logits_RV[rows, columns], peaks_R[rows], temperatures_R[rows]).exp_()
        first, whole = columns.start // BLOCK, tile.shape[1] // BLOCK
        by_block = tile[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))
        sums_RN[rows, first : first + whole] = by_block.sum(-1).double()
        if whole * BLOCK < tile.shape[1]:
            sums_RN[rows, first + whole] = tile[:, whole * BLOCK :].sum(-1).double()
    return sums_RN


def _tiles(R: int, V: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns that are scaled at one time; columns begin at a block."""
    numbers = max(R * V // TILES, SMALLEST_TILE)
    height = max(numbers // V, 1)
    width = V if numbers >= V else numbers // BLOCK * BLOCK
    for top in range(0, R, height):
        for left in range(0, V, width):
            yield slice(top, min(top + height, R)), slice(left, min(left + width, V))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """The `position`-th random number in [0, 1) of every seed's own sequence.

    SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) begun at the mixed seed. A number follows from
    its seed and its position alone, so that neighbours and order change nothing.
    """
    steps = positions.astype(np.uint64) + np.uint64(1)
    mixed = _mix(_mix(seeds) + steps * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
