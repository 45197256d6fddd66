"""Corrections: what is done about tokens sampled from another policy than the one that learns.

Three policies give each token a probability:
    mu    the generator's, which it was sampled from (`generator_logprobs`)
    pi_o  the trainer's before its first update from the batch (`old_logprobs`)
    pi    the trainer's now
k_t = pi_o / mu is what engines that compute differently and weights that are newer than the
sampled ones make together; updates from the batch itself are pi / pi_o. Without `old_logprobs`,
pi_o is pi without its gradient, which is exact for the first update from a batch.

A correction gives target tokens a weight v_t, which has no gradient, or leaves them out. If v_t
holds k_t, the ratio r of the loss becomes pi / pi_o, since pi / mu would count k_t twice. A token
left out is still one that `optim_step` divides by, as in NeMo-RL, OpenRLHF and AReaL: otherwise the
tokens that stay would weigh more, the worse the mismatch. KL and entropy terms keep every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from forge_trainer.types import TrainBatch

from .tokens import MAX_LOG_RATIO, document_means, document_sums, log_ratio

Level = Literal["token", "sequence"]
Weights = tuple[Tensor, Tensor]
"""v_t at target tokens, 0 for one that is left out, and True where the correction has acted."""
SMALLEST_PROBABILITY = 1e-6
"""What divides or is taken the logarithm of is at least this, as in prime-rl."""


@dataclass(frozen=True, slots=True)
class Policies:
    """Log-probs [B, T] of the three policies, without gradient."""

    now_BT: Tensor
    old_BT: Tensor
    generator_BT: Tensor
    batch: TrainBatch

    def log_weights(self) -> Tensor:
        """log k_t."""
        return log_ratio(self.old_BT, self.generator_BT, self.batch)

    def weights(self, level: Level) -> Tensor:
        """k_t, or at every token of a sequence the product of its k_t."""
        log_weights_BT = self.log_weights()
        if level == "sequence":
            sums_BT = document_sums(log_weights_BT, self.batch)
            log_weights_BT = sums_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.exp(log_weights_BT)


def tis(policies: Policies, *, weight_cap: float = 2.0, level: Level = "token") -> Weights:
    """v_t = min(k_t, weight_cap): truncated importance sampling.

    With level="sequence", k_t is the product over the sequence; SkyRL caps that at 5. Source: Yao
    et al. (2025), "Your efficient RL framework secretly brings you off-policy RL training",
    fengyao.notion.site/off-policy-rl; Ionides (2008), "Truncated importance sampling". The cap of
    2 is verl's and SkyRL's.

    Example: k = 0.5, 1, 3 -> v = 0.5, 1, 2
    """
    weights_BT = policies.weights(level)
    return weights_BT.clamp(max=weight_cap), weights_BT > weight_cap


def mis(
    policies: Policies,
    *,
    weight_low: float = 0.0,
    weight_high: float = 3.0,
    level: Level = "sequence",
) -> Weights:
    """v_t = k_t where it lies in [weight_low, weight_high], else 0: masked importance sampling.

    With level="sequence", k_t is the product over the sequence. Source: Liu, Li et al. (2025),
    "When speed kills stability", richardli.xyz/rl-collapse. Level and upper bound are TRL's.

    Example: a sequence with k = 2, 1.4 has the product 2.8 -> v = 2.8, 2.8; with 2, 1.6 -> 0, 0
    """
    return _within(policies.weights(level), weight_low, weight_high)


def icepop(policies: Policies, *, weight_low: float = 0.5, weight_high: float = 5.0) -> Weights:
    """v_t = k_t where it lies in [weight_low, weight_high], else 0, per token.

    Source: Ling Team (2025), Ring-1T, arXiv:2510.18855, M(k); ringtech.notion.site/icepop. The
    bounds are AReaL's and verl's.

    Example: k = 0.4, 1, 5.5 -> v = 0, 1, 0
    """
    return _within(policies.weights("token"), weight_low, weight_high)


def kpop(policies: Policies, *, max_kl: float = 2.0) -> Weights:
    """v_t = k_t where max(D(pi_o || mu), D(mu || pi_o)) <= max_kl, else 0.

    D(p || q) = p log(p/q) + (1-p) log((1-p)/(1-q)): this token against all others together. Unlike
    a band for the ratio, it is wide for rare tokens and narrow for likely ones. Source: Guo et al.
    (2026), ringtech.notion.site/kpop. The bound is AReaL's; prime-rl proposes 0.1, which leaves out
    far more.

    Example: pi_o = 0.99, mu = 0.1: D(mu || pi_o) = 0.1 log(0.1/0.99) + 0.9 log(0.9/0.01) = 3.8
    -> v = 0; pi_o = 0.02, mu = 0.002: k = 10, D(pi_o || mu) = 0.03 -> v = 10
    """
    forward_BT = _bernoulli_kl(policies.old_BT, policies.generator_BT)
    reverse_BT = _bernoulli_kl(policies.generator_BT, policies.old_BT)
    is_far_BT = torch.maximum(forward_BT, reverse_BT) > max_kl
    return _leave_out(policies.weights("token"), is_far_BT)


def decoupled(policies: Policies, *, weight_high: float = 5.0) -> Weights:
    """v_t = k_t up to weight_high, above it 0: decoupled PPO, with PPO's clip on pi / pi_o.

    Needs `old_logprobs`: the proximal policy that updates are held to is apart from the one that
    sampled. Source: Hilton et al. (2021), arXiv:2110.00641; Fu et al. (2025), AReaL,
    arXiv:2505.24298, whose code leaves out weights above 5.

    Example: k = 1.2, 6; pi / pi_o = 1.5; clip 1.2; A = 1 -> objective 1.2 * 1.2, 0
    """
    return _within(policies.weights("token"), 0.0, weight_high)


def geo_mask(
    policies: Policies,
    *,
    geo_low: float = 0.99,
    geo_high: float = 1.01,
    outlier_low: float = 1e-4,
    outlier_high: float = 100.0,
) -> Weights:
    """v_t = 1 for sequences whose geometric mean of k_t lies in [geo_low, geo_high], else 0.

    Also 0 for a sequence with any k_t outside [outlier_low, outlier_high]. The mean does not grow
    with length, as the product does. v_t holds no k_t: without `old_logprobs`, the loss's ratio
    stays pi / mu; with them, it is pi / pi_o as in SkyRL. Source: Li (2025), "RL collapse" part 3,
    richardli.xyz/rl-collapse-3. All four bounds are SkyRL's, where it beat TIS (pull request 1665).

    Example: k = 1.02, 0.98 has the mean 0.9998 -> v = 1, 1; k = 1.02, 1.02 -> 0, 0
    """
    log_weights_BT = policies.log_weights()
    means_BT = torch.exp(document_means(log_weights_BT, policies.batch))
    weights_BT = torch.exp(log_weights_BT)
    is_outlier_BT = (weights_BT < outlier_low) | (weights_BT > outlier_high)
    has_outlier_BT = document_sums(is_outlier_BT.to(weights_BT.dtype), policies.batch) > 0
    is_far_BT = (means_BT < geo_low) | (means_BT > geo_high)
    return _leave_out(torch.ones_like(weights_BT), is_far_BT | has_outlier_BT)


def dppo(policies: Policies, *, max_rise: float = 0.2, max_fall: float = 0.2) -> Weights:
    """v_t = 0 where A_t > 0 and pi - mu > max_rise, or A_t < 0 and mu - pi > max_fall; else 1.

    Leaves out what would move a probability further from the generator's than it is already: the
    binary total variation. It takes the place of a clip, so the paper's objective is the loss
    `importance_sampling` with it; the ratio stays pi / mu. Source: Qi et al. (2026), DPPO,
    arXiv:2602.04879. Bounds are those of prime-rl, which adds 1e-3 (log r)^2.

    Example: pi = 0.5, mu = 0.2: A = 1 -> v = 0; A = -1 -> v = 1
    """
    rise_BT = policies.now_BT.exp() - policies.generator_BT.exp()
    advantages_BT = policies.batch.require("advantages", "dppo")
    rises_too_far_BT = (advantages_BT > 0) & (rise_BT > max_rise)
    falls_too_far_BT = (advantages_BT < 0) & (rise_BT < -max_fall)
    return _leave_out(torch.ones_like(rise_BT), rises_too_far_BT | falls_too_far_BT)


def _within(weights_BT: Tensor, low: float, high: float) -> Weights:
    return _leave_out(weights_BT, (weights_BT < low) | (weights_BT > high))


def _leave_out(weights_BT: Tensor, which_BT: Tensor) -> Weights:
    return torch.where(which_BT, torch.zeros_like(weights_BT), weights_BT), which_BT


def _bernoulli_kl(of_BT: Tensor, to_BT: Tensor) -> Tensor:
    """D(p || q) of log-probs, in nats."""
    p_BT, not_p_BT = _probabilities(of_BT)
    q_BT, not_q_BT = _probabilities(to_BT)
    return p_BT * torch.log(p_BT / q_BT) + not_p_BT * torch.log(not_p_BT / not_q_BT)


def _probabilities(logprobs_BT: Tensor) -> tuple[Tensor, Tensor]:
    """p and 1 - p; the second from the logarithm, as p near 1 has few digits of it left."""
    limits = (SMALLEST_PROBABILITY, 1.0)
    return logprobs_BT.exp().clamp(*limits), (-torch.expm1(logprobs_BT)).clamp(*limits)
