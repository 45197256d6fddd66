"""Estimators of KL(p || p_ref) from samples of p, one number per token.

With d = log p_ref(token) - log p(token):
    k1 = -d              unbiased, can be negative; as a loss term its expected gradient is zero
    k2 = d^2 / 2         biased value, the gradient of KL
    k3 = exp(d) - 1 - d  unbiased and never negative
Source: Schulman (2020), "Approximating KL divergence", joschu.net/blog/kl-approx.html.

Example: p = 1/2, p_ref = 1/4 -> d = -0.693: k1 = 0.693, k2 = 0.240, k3 = 0.193
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from forge_trainer.types import TrainBatch

from .tokens import log_ratio

KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.exp(d) - 1 - d,
}


def kl_to_reference(
    logprobs_BT: Float[Tensor, "B T"], batch: TrainBatch, *, estimator: str = "k3"
) -> Float[Tensor, "B T"]:
    """The estimate at every target token, 0 elsewhere; needs `ref_logprobs`."""
    delta_BT = log_ratio(batch.require("ref_logprobs", "kl"), logprobs_BT, batch)
    return KL_ESTIMATORS[estimator](delta_BT)
