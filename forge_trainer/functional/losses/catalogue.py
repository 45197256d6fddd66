"""Losses: pure functions of selected-token log-probs and the batch's fields.

Every loss returns a SUM over target tokens, each token weighted by `token_weights` where given.
No loss divides: `optim_step(normalize=...)` knows the whole world's count and does it once.
In the formulas, w_t is the token's weight, A_t its advantage, and r_t = p(token_t) /
p_generator(token_t) the importance ratio. Clip ranges are bounds on a ratio.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from forge_trainer.metrics import Metric
from forge_trainer.types import LossOutput, TrainBatch

from .tokens import (
    document_means,
    log_ratio,
    token_mean,
    weighted_sum,
)


def cross_entropy(logprobs_BT: Float[Tensor, "B T"], batch: TrainBatch) -> LossOutput:
    """-sum_t w_t log p(token_t): maximum likelihood, the loss of supervised fine-tuning."""
    return LossOutput(total=weighted_sum(-logprobs_BT, batch))


def reinforce(logprobs_BT: Float[Tensor, "B T"], batch: TrainBatch) -> LossOutput:
    """-sum_t w_t A_t log p(token_t): the on-policy policy gradient, without importance ratio.

    Source: Williams (1992), "Simple statistical gradient-following algorithms", eq. 11.
    """
    advantages_BT = batch.require("advantages", "reinforce")
    return LossOutput(total=weighted_sum(-advantages_BT * logprobs_BT, batch))


def importance_sampling(logprobs_BT: Float[Tensor, "B T"], batch: TrainBatch) -> LossOutput:
    """-sum_t w_t r_t A_t: the policy gradient corrected for the generator's distribution.

    The gradient is that of `reinforce` times r_t. Source: Schulman et al. (2017), PPO,
    arXiv:1707.06347, eq. 6 (there called L^CPI), per token.
    """
    ratio_BT = _ratio("importance_sampling", logprobs_BT, batch)
    advantages_BT = batch.require("advantages", "importance_sampling")
    return LossOutput(
        total=weighted_sum(-ratio_BT * advantages_BT, batch),
        metrics={"loss/ratio": token_mean(ratio_BT, batch)},
    )


def ppo(
    logprobs_BT: Float[Tensor, "B T"],
    batch: TrainBatch,
    *,
    ratio_low: float = 0.8,
    ratio_high: float = 1.2,
) -> LossOutput:
    """-sum_t w_t min(r_t A_t, clip(r_t, ratio_low, ratio_high) A_t): PPO's objective, no critic.

    Advantages are the caller's. Source: Schulman et al. (2017), arXiv:1707.06347, eq. 7.

    Example: one token with A = 1, r = 1.5, ratio_high = 1.2 -> -1.2, and no gradient.
    """
    return _clipped_surrogate("ppo", logprobs_BT, batch, ratio_low, ratio_high)


def grpo(
    logprobs_BT: Float[Tensor, "B T"],
    batch: TrainBatch,
    *,
    ratio_low: float = 0.8,
    ratio_high: float = 1.2,
) -> LossOutput:
    """PPO's surrogate on group advantages; its KL term is the option kl_coef, with k3.

    -sum_t w_t [min(r_t A_t, clip(r_t, ratio_low, ratio_high) A_t) - kl_coef k3_t].
    Source: Shao et al. (2024), DeepSeekMath, arXiv:2402.03300, eq. 3 and 4. Its per-sequence
    mean 1/|o_i| enters as `token_weights`, with normalize="sequences".
    """
    return _clipped_surrogate("grpo", logprobs_BT, batch, ratio_low, ratio_high)


def dapo(
    logprobs_BT: Float[Tensor, "B T"],
    batch: TrainBatch,
    *,
    ratio_low: float = 0.8,
    ratio_high: float = 1.28,
) -> LossOutput:
    """PPO's surrogate with a higher upper bound, for a mean over all tokens of all groups.

    -sum_t w_t min(r_t A_t, clip(r_t, ratio_low, ratio_high) A_t), no KL term.
    Source: Yu et al. (2025), DAPO, arXiv:2503.14476, eq. 8 and 10; its token-level mean is
    normalize="tokens". Dynamic sampling and overlong shaping happen before the loss.
    """
    return _clipped_surrogate("dapo", logprobs_BT, batch, ratio_low, ratio_high)


def cispo(
    logprobs_BT: Float[Tensor, "B T"],
    batch: TrainBatch,
    *,
    ratio_low: float = 0.0,
    ratio_high: float = 1.2,
) -> LossOutput:
    """-sum_t w_t sg(clip(r_t, ratio_low, ratio_high)) A_t log p(token_t).

    The clipped ratio is a constant weight (sg: no gradient), so that every token keeps one.
    Source: MiniMax-M1 (2025), arXiv:2506.13585, eq. 4 and 5, which leaves out the lower bound.

    Example: one token with A = 1, r = 1.5, ratio_high = 1.2 -> gradient -1.2
    """
    ratio_BT = _ratio("cispo", logprobs_BT, batch).detach()
    clipped_BT = ratio_BT.clamp(ratio_low, ratio_high)
    advantages_BT = batch.require("advantages", "cispo")
    metrics: dict[str, Metric] = {
        "loss/ratio": token_mean(ratio_BT, batch),
        "loss/clip_fraction": token_mean((clipped_BT != ratio_BT).float(), batch),
    }
    return LossOutput(weighted_sum(-clipped_BT * advantages_BT * logprobs_BT, batch), metrics)


def gspo(
    logprobs_BT: Float[Tensor, "B T"],
    batch: TrainBatch,
    *,
    ratio_low: float = 0.9997,
    ratio_high: float = 1.0004,
) -> LossOutput:
    """-sum_t w_t min(s A_t, clip(s, ratio_low, ratio_high) A_t), s the ratio of the sequence.

    s = exp(mean over the sequence's targets of log r_t). The paper's mean over sequences is
    `token_weights` 1/|o_i| with normalize="sequences".
    Source: Zheng et al. (2025), GSPO, arXiv:2507.18071, eq. 5 and 7.
    """
    log_ratio_BT = log_ratio(logprobs_BT, batch.require("generator_logprobs", "gspo"), batch)
    ratio_BT = torch.exp(document_means(log_ratio_BT, batch))
    return _clipped("gspo", ratio_BT, batch, ratio_low, ratio_high)


def dro(logprobs_BT: Float[Tensor, "B T"], batch: TrainBatch, *, beta: float = 0.05) -> LossOutput:
    """-sum_t w_t [A_t log p(token_t) - beta/2 (log r_t)^2]: a quadratic pull to the generator.

    Source: Richemond et al. (2024), Direct Reward Optimisation, arXiv:2405.19107: the gradient of
    its objective with respect to the policy, with A_t for reward minus value, per token.

    Example: one token with A = 1, log r = 0.4, beta = 0.05 -> gradient -(1 - 0.05 * 0.4) = -0.98
    """
    log_ratio_BT = log_ratio(logprobs_BT, batch.require("generator_logprobs", "dro"), batch)
    advantages_BT = batch.require("advantages", "dro")
    objective_BT = advantages_BT * logprobs_BT - beta / 2 * log_ratio_BT.square()
    return LossOutput(
        total=weighted_sum(-objective_BT, batch),
        metrics={"loss/ratio": token_mean(torch.exp(log_ratio_BT), batch)},
    )


def _ratio(name: str, logprobs_BT: Tensor, batch: TrainBatch) -> Tensor:
    return torch.exp(log_ratio(logprobs_BT, batch.require("generator_logprobs", name), batch))


def _clipped_surrogate(
    name: str, logprobs_BT: Tensor, batch: TrainBatch, ratio_low: float, ratio_high: float
) -> LossOutput:
    return _clipped(name, _ratio(name, logprobs_BT, batch), batch, ratio_low, ratio_high)


def _clipped(
    name: str, ratio_BT: Tensor, batch: TrainBatch, ratio_low: float, ratio_high: float
) -> LossOutput:
    advantages_BT = batch.require("advantages", name)
    clipped_BT = ratio_BT.clamp(ratio_low, ratio_high) * advantages_BT
    unclipped_BT = ratio_BT * advantages_BT
    metrics: dict[str, Metric] = {
        "loss/ratio": token_mean(ratio_BT, batch),
        "loss/clip_fraction": token_mean((clipped_BT < unclipped_BT).float(), batch),
    }
    surrogate_BT = torch.minimum(unclipped_BT, clipped_BT)
    return LossOutput(weighted_sum(-surrogate_BT, batch), metrics)
