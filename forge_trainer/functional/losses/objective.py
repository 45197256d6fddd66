"""From a loss's name and options to something an engine can call.

A registered loss takes its own options and those of the terms that any loss can add:
    kl_coef, kl_estimator   + kl_coef * sum_t w_t k_t, the KL to a reference (needs ref_logprobs)
    entropy_coef            - entropy_coef * sum_t w_t H_t, a bonus on the policy's entropy
and those of a correction of off-policy tokens, see `corrections`:
    correction              tis, mis, icepop, kpop, decoupled, geo_mask or dppo
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forge_trainer.errors import ConfigError
from forge_trainer.functional.losses import catalogue as losses
from forge_trainer.functional.named import import_callable
from forge_trainer.types import LossFn, LossOutput, TrainBatch

from .correcting import Correction, find_correction, options_of, take_correction, takers_of
from .kl import KL_ESTIMATORS, kl_to_reference
from .tokens import token_mean, weighted_sum

_ADVANTAGES = ("advantages",)
_RATIO = ("advantages", "generator_logprobs")

LOSSES: dict[str, tuple[Callable[..., LossOutput], tuple[str, ...]]] = {
    "cross_entropy": (losses.cross_entropy, ()),
    "importance_sampling": (losses.importance_sampling, _RATIO),
    "reinforce": (losses.reinforce, _ADVANTAGES),
    "ppo": (losses.ppo, _RATIO),
    "grpo": (losses.grpo, _RATIO),
    "dapo": (losses.dapo, _RATIO),
    "cispo": (losses.cispo, _RATIO),
    "gspo": (losses.gspo, _RATIO),
    "dro": (losses.dro, _RATIO),
}
"""Name -> the loss and the per-token fields that every sequence must carry for it."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What is added to a loss."""

    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss with its options bound, its tokens corrected and its terms added. Keeps `LossFn`."""

    loss_fn: LossFn
    terms: Terms = Terms()
    correction: Correction | None = None

    @property
    def needs_entropy(self) -> bool:
        return self.terms.entropy_coef != 0.0

    def __call__(self, logprobs_BT: Tensor, batch: TrainBatch) -> LossOutput:
        corrected, metrics = (
            (batch, {}) if self.correction is None else self.correction(logprobs_BT, batch)
        )
        output = self.loss_fn(logprobs_BT, corrected)
        total, metrics = output.total, output.metrics | metrics
        if self.terms.kl_coef:
            kl_BT = kl_to_reference(logprobs_BT, batch, estimator=self.terms.kl_estimator)
            total = total + self.terms.kl_coef * weighted_sum(kl_BT, batch)
            metrics["loss/ref_kl"] = token_mean(kl_BT, batch)
        if self.terms.entropy_coef:
            entropies_BT = batch.require("entropies", "entropy_coef")
            total = total - self.terms.entropy_coef * weighted_sum(entropies_BT, batch)
            metrics["loss/entropy"] = token_mean(entropies_BT, batch)
        return LossOutput(total, metrics)


def make_loss(loss: str | LossFn, config: Mapping[str, Any] | None = None) -> LossFn:
    """A loss function with its options bound.

    A callable of the user's, which "package.module:name" may point at, gets `config` as keyword
    arguments. It gets entropies, in `batch.entropies_BT`, if it has an attribute `needs_entropy`
    that is true.

    Raises:
        ConfigError: the name is not registered, or an option is not one of the loss.
    """
    options = dict(config or {})
    if isinstance(loss, str) and ":" in loss:
        loss = import_loss(loss, options)
    if not isinstance(loss, str):
        if not callable(loss):
            raise ConfigError(f"loss must be a name or a function, got {type(loss).__name__}")
        return functools.partial(loss, **options) if options else loss
    if loss not in LOSSES:
        raise ConfigError(f"loss {loss!r} is not registered; use one of {sorted(LOSSES)}")
    function, _ = LOSSES[loss]
    named = find_correction(options)
    known = list(inspect.signature(function).parameters)[2:]
    known += [*Terms.__slots__, "correction", *(options_of(named) if named else ())]
    if unknown := sorted(set(options) - set(known)):
        raise ConfigError(_unknown(loss, unknown, known))
    correction = take_correction(loss, options)
    for name, value in options.items():
        _check_option(loss, name, value)
    _check_clip_range(loss, function, options)
    if "kl_estimator" in options and not options.get("kl_coef"):
        raise ConfigError(
            f"loss {loss!r}: kl_estimator is given, but no kl_coef; give kl_coef, or leave it out"
        )
    terms = Terms(**{name: options.pop(name) for name in Terms.__slots__ if name in options})
    bound = functools.partial(function, **options) if options else function
    return Objective(bound, terms, correction)


def _unknown(loss: str, unknown: Sequence[str], known: Sequence[str]) -> str:
    message = f"loss {loss!r} has no option {list(unknown)}; it takes {list(known)}"
    takers = {name: takers_of(name) for name in unknown if takers_of(name)}
    hints = [f"{name} belongs to correction: {' or '.join(who)}" for name, who in takers.items()]
    return "; ".join([message, *hints])


def import_loss(where: str, options: Mapping[str, Any]) -> LossFn:
    """The user's loss at "package.module:name", if it takes the options.

    Raises:
        ConfigError: there is none, or it does not.
    """
    function: LossFn = import_callable("loss", where)
    try:
        inspect.signature(function).bind(None, None, **options)
    except TypeError as error:
        raise ConfigError(
            f"loss {where!r} cannot be called with (logprobs_BT, batch) and {sorted(options)}: "
            f"{error}"
        ) from None
    except ValueError:
        # It says nothing of its parameters.
        pass
    return function


def _check_clip_range(
    loss: str, function: Callable[..., LossOutput], options: Mapping[str, Any]
) -> None:
    """A ratio of 1, that of a token which nothing has changed, must lie within the bounds."""
    parameters = inspect.signature(function).parameters
    if "ratio_low" not in parameters:
        return
    low, high = (
        options.get(name, parameters[name].default) for name in ("ratio_low", "ratio_high")
    )
    if not low <= 1 <= high:
        raise ConfigError(
            f"loss {loss!r}: ratio_low={low} and ratio_high={high} must have 1 between them; they "
            "are bounds on the ratio itself, such as 0.8 and 1.2"
        )


def _check_option(loss: str, name: str, value: object) -> None:
    if name == "kl_estimator":
        if value not in KL_ESTIMATORS:
            raise ConfigError(f"loss {loss!r}: {name} is {value!r}; use one of {[*KL_ESTIMATORS]}")
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]
        raise ConfigError(f"loss {loss!r}: {name} is {value!r}; it must be a number of at least 0")


def needs_entropy(loss_fn: LossFn) -> bool:
    """True if the loss reads `batch.entropies_BT`."""
    inner = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    return bool(getattr(inner, "needs_entropy", False))
