"""What must be known of every token for a loss, told before any is computed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from forge_trainer.errors import ConfigError
from forge_trainer.types import LossFn

from .correcting import find_correction
from .objective import LOSSES


def required_fields(loss: str | LossFn, config: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """The per-token fields a registered loss cannot do without; nothing is known of a callable."""
    if not isinstance(loss, str) or loss not in LOSSES:
        return ()
    options = config or {}
    fields = list(LOSSES[loss][1])
    if options.get("kl_coef"):
        fields.append("ref_logprobs")
    correction = find_correction(options)
    if correction is not None:
        fields += correction.needs
        if loss == "dro" and correction.ratio_to == "old":
            # Its pull is to what the ratio compares with, and nothing pulls a policy to itself.
            fields.append("old_logprobs")
    return tuple(dict.fromkeys(fields))


def check_old_logprobs(
    loss: str | LossFn, options: Mapping[str, Any], *, are_given: bool, updates_per_batch: int
) -> None:
    """`old_logprobs`, which a run gives if told to, are given where they count, and only there.

    Raises:
        ConfigError: says which it is.
    """
    if not isinstance(loss, str) or loss not in LOSSES:
        return
    correction = find_correction(options)
    named = f"loss {loss!r} with correction: {options.get('correction')}"
    if are_given:
        if correction is None or correction.ratio_to == "generator":
            raise ConfigError(
                f"{named} compares with the generator alone, so that recomputed log-probs would be "
                "of no use; give another correction, or leave algorithm.recompute_logprobs out"
            )
        return
    clips = "ratio_low" in inspect.signature(LOSSES[loss][0]).parameters
    if "old_logprobs" in required_fields(loss, options):
        why = "needs the trainer's log-probs from before a batch's first update"
    elif correction and correction.ratio_to == "old" and clips and updates_per_batch > 1:
        why = (
            f"makes {updates_per_batch} updates from a batch and clips the ratio to the trainer's "
            "log-probs from before the first; without those nothing is ever clipped"
        )
    else:
        return
    raise ConfigError(f"{named} {why}; set algorithm.recompute_logprobs to true")
