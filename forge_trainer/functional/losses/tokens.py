"""What losses are built from: ratios, sums and means over target tokens."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from forge_trainer.metrics import Mean
from forge_trainer.types import TrainBatch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this: exp(20) is 5e8."""


def log_ratio(
    of_BT: Float[Tensor, "B T"], to_BT: Float[Tensor, "B T"], batch: TrainBatch
) -> Float[Tensor, "B T"]:
    """log(p_of / p_to) at target tokens, within what exp and its gradient can take.

    Outside the mask it means nothing and is zero: exp could overflow there, and zero times
    infinity is a NaN gradient. A ratio beyond e^20 is as good as e^20, which no loss follows.
    """
    delta_BT = torch.where(batch.loss_mask_BT, of_BT - to_BT, torch.zeros_like(of_BT))
    return delta_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def weighted_sum(per_token_BT: Float[Tensor, "B T"], batch: TrainBatch) -> Float[Tensor, ""]:
    """sum_t w_t x_t over target tokens; w_t is 1 where `token_weights` are not given."""
    if batch.token_weights_BT is not None:
        per_token_BT = per_token_BT * batch.token_weights_BT
    return torch.where(batch.loss_mask_BT, per_token_BT, torch.zeros_like(per_token_BT)).sum()


def token_mean(per_token_BT: Float[Tensor, "B T"], batch: TrainBatch) -> Mean:
    """The plain mean over target tokens, for metrics; stays on the device."""
    mask_BT = batch.loss_mask_BT
    total = torch.where(mask_BT, per_token_BT.detach(), torch.zeros_like(per_token_BT)).sum()
    return Mean(total, mask_BT.sum())  # type: ignore[arg-type]


def document_means(per_token_BT: Float[Tensor, "B T"], batch: TrainBatch) -> Float[Tensor, "B T"]:
    """At every token, the mean over the target tokens of its document; 0 outside of documents.

    Example: values [1 3 | 5], all targets, documents [0 0 | 1] -> [2 2 | 5]
    """
    sums, index_BT = _by_document(per_token_BT, batch)
    counts = torch.zeros_like(sums).index_add(
        0, index_BT.reshape(-1), batch.loss_mask_BT.reshape(-1).to(sums.dtype)
    )
    return (sums / counts.clamp(min=1))[index_BT]


def document_sums(per_token_BT: Float[Tensor, "B T"], batch: TrainBatch) -> Float[Tensor, "B T"]:
    """At every token, the sum over the target tokens of its document; 0 outside of documents.

    Example: values [1 3 | 5], all targets, documents [0 0 | 1] -> [4 4 | 5]
    """
    sums, index_BT = _by_document(per_token_BT, batch)
    return sums[index_BT]


def _by_document(per_token_BT: Tensor, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Sums over target tokens, one per document, and at every token the index of its own."""
    _, index_BT = torch.unique(batch.document_ids_BT, return_inverse=True)
    masked_BT = torch.where(batch.loss_mask_BT, per_token_BT, torch.zeros_like(per_token_BT))
    zeros = per_token_BT.new_zeros(int(index_BT.max()) + 1)
    return zeros.index_add(0, index_BT.reshape(-1), masked_BT.reshape(-1)), index_BT
