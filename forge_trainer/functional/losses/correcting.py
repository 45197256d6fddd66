"""From a correction's name and options to what it makes of a batch, before a loss sees it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from forge_trainer.errors import ConfigError
from forge_trainer.metrics import Metric
from forge_trainer.types import TrainBatch

from . import corrections
from .corrections import Level, Policies, Weights
from .tokens import token_mean

RatioTo = Literal["old", "old_if_given", "generator"]


@dataclass(frozen=True, slots=True)
class Registered:
    """A correction as a name finds it."""

    weigh: Callable[..., Weights]
    ratio_to: RatioTo
    """The policy that the loss's ratio compares with: pi_o where the weights hold pi_o / mu."""
    needs: tuple[str, ...] = ("generator_logprobs",)
    """Per-token fields."""


CORRECTIONS: dict[str, Registered] = {
    "tis": Registered(corrections.tis, "old"),
    "mis": Registered(corrections.mis, "old"),
    "icepop": Registered(corrections.icepop, "old"),
    "kpop": Registered(corrections.kpop, "old"),
    "decoupled": Registered(corrections.decoupled, "old", ("generator_logprobs", "old_logprobs")),
    "geo_mask": Registered(corrections.geo_mask, "old_if_given"),
    "dppo": Registered(corrections.dppo, "generator", ("generator_logprobs", "advantages")),
}

RANGES: dict[str, tuple[float, float]] = {
    "weight_cap": (1.0, 1e9),
    "weight_low": (0.0, 1.0),
    "weight_high": (1.0, 1e9),
    "geo_low": (0.0, 1.0),
    "geo_high": (1.0, 1e9),
    "outlier_low": (0.0, 1.0),
    "outlier_high": (1.0, 1e9),
    "max_kl": (1e-6, 1e9),
    "max_rise": (1e-6, 1.0),
    "max_fall": (1e-6, 1.0),
}
"""Of every number: a token on which the policies agree passes as it is."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A correction with its options bound."""

    name: str
    options: Mapping[str, Any]

    def __call__(
        self, logprobs_BT: Tensor, batch: TrainBatch
    ) -> tuple[TrainBatch, dict[str, Metric]]:
        """The batch with what the loss is to see in place, and how much of it was touched."""
        registered = CORRECTIONS[self.name]
        given = {name: batch.require(name, self.name) for name in registered.needs}
        generator_BT, now_BT = given["generator_logprobs"], logprobs_BT.detach()
        old_BT = now_BT if batch.old_logprobs_BT is None else batch.old_logprobs_BT
        policies = Policies(now_BT, old_BT, generator_BT, batch)
        weights_BT, touched_BT = registered.weigh(policies, **self.options)
        to_old = registered.ratio_to == "old" or (
            registered.ratio_to == "old_if_given" and batch.old_logprobs_BT is not None
        )
        own_BT = batch.token_weights_BT
        corrected = dataclasses.replace(
            batch,
            loss_mask_BT=batch.loss_mask_BT & (weights_BT > 0),
            token_weights_BT=weights_BT if own_BT is None else own_BT * weights_BT,
            generator_logprobs_BT=old_BT if to_old else generator_BT,
        )
        return corrected, {
            "loss/corrected": token_mean(touched_BT.to(weights_BT.dtype), batch),
            "loss/correction_weight": token_mean(weights_BT, batch),
        }


def take_correction(loss: str, options: dict[str, Any]) -> Correction | None:
    """The correction that options of a loss name, if any; its own are taken out of them.

    Raises:
        ConfigError: it is not registered, or a number cannot be meant.
    """
    correction, name = find_correction(options), options.pop("correction", None)
    if name is None:
        return None
    if correction is None:
        raise ConfigError(f"loss {loss!r}: correction is {name!r}; use one of {[*CORRECTIONS]}")
    own = {key: options.pop(key) for key in options_of(correction) if key in options}
    for key, value in own.items():
        _check_option(loss, key, value)
    return Correction(name, own)


def find_correction(options: Mapping[str, Any]) -> Registered | None:
    """What the options of a loss name, if it is registered."""
    name = options.get("correction")
    return CORRECTIONS.get(name) if isinstance(name, str) else None


def options_of(correction: Registered) -> list[str]:
    """What a correction takes."""
    return list(inspect.signature(correction.weigh).parameters)[1:]


def takers_of(option: str) -> list[str]:
    """The corrections that take an option."""
    return [name for name, one in CORRECTIONS.items() if option in options_of(one)]


def _check_option(loss: str, name: str, value: Any) -> None:
    if name == "level":
        if value not in get_args(Level):
            raise ConfigError(f"loss {loss!r}: level is {value!r}; use one of {get_args(Level)}")
        return
    low, high = RANGES[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and low <= value <= high):
        raise ConfigError(
            f"loss {loss!r}: {name} is {value!r}; it must be a number from {low:g} to {high:g}, so "
            "that a token on which trainer and generator agree passes as it is"
        )
