"""How far the policy that learns is from the one that tokens were sampled from, as numbers.

Measured wherever the generator's log-probs are given, whatever the loss; changes nothing.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from forge_trainer.metrics import (
    BINS_PER_DECADE,
    NUM_BINS,
    SMALLEST_COUNTED,
    Max,
    Metric,
    Quantile,
    SampleSize,
)
from forge_trainer.types import TrainBatch

from .tokens import log_ratio, token_mean


@torch.no_grad()
def mismatch(logprobs_BT: Float[Tensor, "B T"], batch: TrainBatch) -> dict[str, Metric]:
    """Over target tokens, the gap |log pi - log mu| and the importance weights pi / mu.

    pi is the policy that learns, mu the generator's. Nothing where mu is not given.
    """
    if batch.generator_logprobs_BT is None:
        return {}
    log_ratio_BT = log_ratio(logprobs_BT, batch.generator_logprobs_BT, batch)
    gap_BT, ratio_BT = log_ratio_BT.abs(), log_ratio_BT.exp()
    weights = torch.where(batch.loss_mask_BT, ratio_BT, torch.zeros_like(ratio_BT))
    return {
        "rollout/logprob_gap": token_mean(gap_BT, batch),
        "rollout/logprob_gap_max": Max(gap_BT.max()),  # type: ignore[arg-type]
        "rollout/logprob_gap_p99": Quantile(_counts(gap_BT, batch)),  # type: ignore[arg-type]
        "rollout/ratio": token_mean(ratio_BT, batch),
        "rollout/effective_sample_size": SampleSize(
            weights.sum(),  # type: ignore[arg-type]
            weights.square().sum(),  # type: ignore[arg-type]
            batch.loss_mask_BT.sum(),  # type: ignore[arg-type]
        ),
    }


def _counts(values_BT: Tensor, batch: TrainBatch) -> Tensor:
    """How many target tokens fall into each bin of `Quantile`."""
    above_BT = (values_BT / SMALLEST_COUNTED).log10() * BINS_PER_DECADE
    # What is no number counts as the largest: an index must be one, also where a step is skipped.
    above_BT = above_BT.floor().nan_to_num(nan=float(NUM_BINS))
    index_BT = above_BT.clamp(-1, NUM_BINS - 2).long() + 1
    ones_BT = batch.loss_mask_BT.to(values_BT.dtype)
    return values_BT.new_zeros(NUM_BINS).index_add(0, index_BT.reshape(-1), ones_BT.reshape(-1))
