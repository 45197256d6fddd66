"""Losses: pure functions of selected-token log-probs and the batch's fields.

Every loss returns a SUM over target tokens, each token weighted by `token_weights` where given.
No loss divides: `optim_step(normalize=...)` knows the whole world's count and does it once.
Clip ranges are bounds on the ratio: clip_low = 0.2 and clip_high = 0.28 mean [0.8, 1.28].
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from forge_trainer.errors import ConfigError
from forge_trainer.metrics import Max, Mean, Metric
from forge_trainer.types import LossFn, LossOutput, TrainBatch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this: exp(20) is 5e8."""


def cross_entropy(logprobs_BT: Float[Tensor, "B T"], batch: TrainBatch) -> LossOutput:
    """-sum_t w_t log p(token_t): maximum likelihood, the loss of supervised fine-tuning."""
    return LossOutput(total=_weighted_sum(-logprobs_BT, batch))


def reinforce(logprobs_BT: Float[Tensor, "B T"], batch: TrainBatch) -> LossOutput:
    """-sum_t w_t A_t log p(token_t): the on-policy policy gradient, without importance ratio.

    Source: Williams (1992), "Simple statistical gradient-following algorithms", eq. 11.
    """
    advantages_BT = batch.require("advantages", "reinforce")
    return LossOutput(total=_weighted_sum(-advantages_BT * logprobs_BT, batch))


def grpo(
    logprobs_BT: Float[Tensor, "B T"],
    batch: TrainBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
) -> LossOutput:
    """Clipped surrogate on group advantages, with an optional KL penalty to a reference.

    -sum_t w_t [min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) - kl_coef k3_t], where
    r_t = p(token_t) / p_generator(token_t) and k3 = exp(d) - d - 1 with d = log p_ref - log p.
    Source: Shao et al. (2024), DeepSeekMath, arXiv:2402.03300, eq. 3 and 4. Its per-sequence
    mean 1/|o_i| enters as `token_weights`, with normalize="sequences".

    Example: one token with A = 1, r = 1.5, clip_high = 0.2 -> -1.2, and no gradient.
    """
    surrogate_BT, metrics = _clipped_surrogate("grpo", logprobs_BT, batch, clip_low, clip_high)
    if kl_coef:
        delta_BT = _log_ratio(
            batch.require("ref_logprobs", "grpo with kl_coef"), logprobs_BT, batch
        )
        k3_BT = torch.exp(delta_BT) - delta_BT - 1.0
        surrogate_BT = surrogate_BT - kl_coef * k3_BT
        metrics["loss/ref_kl"] = _token_mean(k3_BT, batch)
    return LossOutput(total=_weighted_sum(-surrogate_BT, batch), metrics=metrics)


def dapo(
    logprobs_BT: Float[Tensor, "B T"],
    batch: TrainBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> LossOutput:
    """Clipped surrogate with a higher upper bound, for a mean over all tokens of all groups.

    -sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), no KL term.
    Source: Yu et al. (2025), DAPO, arXiv:2503.14476, eq. 8 and 10; its token-level mean is
    normalize="tokens". Dynamic sampling and overlong shaping happen before the loss.
    """
    surrogate_BT, metrics = _clipped_surrogate("dapo", logprobs_BT, batch, clip_low, clip_high)
    return LossOutput(total=_weighted_sum(-surrogate_BT, batch), metrics=metrics)


@dataclass(frozen=True, slots=True)
class RegisteredLoss:
    fn: Callable[..., LossOutput]
    required_fields: tuple[str, ...] = ()
    """Per-token fields that every sequence must carry."""


LOSSES: dict[str, RegisteredLoss] = {
    "cross_entropy": RegisteredLoss(cross_entropy),
    "reinforce": RegisteredLoss(reinforce, ("advantages",)),
    "grpo": RegisteredLoss(grpo, ("advantages", "generator_logprobs")),
    "dapo": RegisteredLoss(dapo, ("advantages", "generator_logprobs")),
}


def make_loss(loss: str | LossFn, config: Mapping[str, Any] | None = None) -> LossFn:
    """A loss function with its options bound.

    Raises:
        ConfigError: the name is not registered, or an option is not one of the loss.
    """
    options = dict(config or {})
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise ConfigError(f"loss {loss!r} is not registered; use one of {sorted(LOSSES)}")
        known = list(inspect.signature(LOSSES[loss].fn).parameters)[2:]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise ConfigError(f"loss {loss!r} has no option {unknown}; it takes {known}")
        for name, value in options.items():
            _require_number(loss, name, value)
        loss_fn: Callable[..., LossOutput] = LOSSES[loss].fn
    else:
        loss_fn = loss
    return functools.partial(loss_fn, **options) if options else loss_fn


def _require_number(loss: str, name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
        raise ConfigError(f"loss {loss!r}: {name} is {value!r}; it must be a number of at least 0")


def required_fields(loss: str | LossFn, config: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """The per-token fields a registered loss cannot do without; nothing is known of a callable."""
    if not isinstance(loss, str) or loss not in LOSSES:
        return ()
    needs_reference = bool((config or {}).get("kl_coef"))
    return LOSSES[loss].required_fields + (("ref_logprobs",) if needs_reference else ())


def _clipped_surrogate(
    name: str, logprobs_BT: Tensor, batch: TrainBatch, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Metric]]:
    advantages_BT = batch.require("advantages", name)
    log_ratio_BT = _log_ratio(logprobs_BT, batch.require("generator_logprobs", name), batch)
    ratio_BT = torch.exp(log_ratio_BT)
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate_BT = torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    is_clipped_BT = clipped_BT * advantages_BT < ratio_BT * advantages_BT
    metrics: dict[str, Metric] = {
        "loss/ratio": _token_mean(ratio_BT, batch),
        "loss/clip_fraction": _token_mean(is_clipped_BT.float(), batch),
    }
    return surrogate_BT, metrics


@torch.no_grad()
def logprob_gap(logprobs_BT: Float[Tensor, "B T"], batch: TrainBatch) -> dict[str, Metric]:
    """|log p - log p_generator| over target tokens; nothing where the generator's are not given."""
    if batch.generator_logprobs_BT is None:
        return {}
    gap_BT = _log_ratio(logprobs_BT, batch.generator_logprobs_BT, batch).abs()
    return {
        "rollout/logprob_gap": _token_mean(gap_BT, batch),
        "rollout/logprob_gap_max": Max(gap_BT.max()),  # type: ignore[arg-type]
    }


def _log_ratio(of_BT: Tensor, to_BT: Tensor, batch: TrainBatch) -> Tensor:
    """log(p_of / p_to) at target tokens, within what exp and its gradient can take.

    Outside the mask it means nothing and is zero: exp could overflow there, and zero times
    infinity is a NaN gradient. A ratio beyond e^20 is as good as e^20, which no loss follows.
    """
    delta_BT = torch.where(batch.loss_mask_BT, of_BT - to_BT, torch.zeros_like(of_BT))
    return delta_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _weighted_sum(per_token_BT: Tensor, batch: TrainBatch) -> Tensor:
    if batch.token_weights_BT is not None:
        per_token_BT = per_token_BT * batch.token_weights_BT
    return torch.where(batch.loss_mask_BT, per_token_BT, torch.zeros_like(per_token_BT)).sum()


def _token_mean(per_token_BT: Tensor, batch: TrainBatch) -> Mean:
    mask_BT = batch.loss_mask_BT
    total = torch.where(mask_BT, per_token_BT.detach(), torch.zeros_like(per_token_BT)).sum()
    return Mean(total, mask_BT.sum())  # type: ignore[arg-type]
