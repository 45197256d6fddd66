"""Whether the generator still samples from the policy that is trained; one bound, judged here."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from forge_trainer.config import AlgorithmConfig
from forge_trainer.errors import MismatchError
from forge_trainer.metrics import merge_metrics, metric_values
from forge_trainer.types import Episode, TrainStepResult
from forge_trainer.types.arrays import as_array

logger = logging.getLogger(__name__)

GAP = "rollout/logprob_gap"
WHAT_TO_LOOK_AT = (
    "Look at the age of what was trained on (policy_version against step, "
    "async.max_staleness), at weights.dtype and trainer.compute_dtype, and at whether both "
    "sides run the same weights (`python -m apps.weights.main verify`); then at "
    "algorithm.loss_options.correction, or raise algorithm.max_logprob_gap"
)


def judge_mismatch(results: Sequence[TrainStepResult], algorithm: AlgorithmConfig) -> None:
    """Hold the updates of a batch to `max_logprob_gap`: nothing, or one warning in the log.

    A gap that is no number is above any bound.

    Raises:
        MismatchError: it is exceeded, and `on_logprob_gap` is stop.
    """
    bound = algorithm.max_logprob_gap
    measured = metric_values(merge_metrics(one.forward_backward.metrics for one in results))
    if bound is None or GAP not in measured or measured[GAP] <= bound:
        return
    step = results[-1].optim.step
    message = (
        f"trainer and generator are {measured[GAP]:.3g} nats apart in a token's log-prob (99% of "
        f"tokens at most {measured[f'{GAP}_p99']:.3g}, the worst {measured[f'{GAP}_max']:.3g}; "
        f"effective sample size {measured['rollout/effective_sample_size']:.1%}); "
        f"algorithm.max_logprob_gap is {bound:g}. {WHAT_TO_LOOK_AT}"
    )
    if algorithm.on_logprob_gap == "stop":
        raise MismatchError(message, phase="training", step=step)
    logger.warning("step %d: %s", step, message)


def count_unscored(episodes: Iterable[Episode]) -> int:
    """Sampled tokens without a finite log-prob; they are no targets."""
    return sum(
        int(np.count_nonzero(~np.isfinite(as_array(transcript.logprobs))))
        for episode in episodes
        for transcript in episode.transcripts
    )
