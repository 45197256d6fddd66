"""From a group of episodes to the sequences a trainer learns from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_trainer.types import Episode, TrainSequence

from .advantages import group_advantages


def group_sequences(
    episodes_G: Sequence[Episode], *, divide_by_std: bool, per_sequence_mean: bool
) -> list[TrainSequence]:
    """One sequence per episode: prompt and completion, every completion token a target whose
    log-prob is finite.

    With `per_sequence_mean`, each token weighs 1/|o_i|, so that a sum over sequences is a sum
    of means (use normalize="sequences").
    """
    advantages_G = group_advantages([e.reward for e in episodes_G], divide_by_std=divide_by_std)
    return [
        _episode_sequence(episode, advantage, per_sequence_mean)
        for episode, advantage in zip(episodes_G, advantages_G, strict=True)
    ]


def deal_minibatches(
    sequences: Sequence[TrainSequence], *, epochs: int, minibatches: int, seed: str
) -> Iterator[Sequence[TrainSequence]]:
    """Every epoch's sequences in a new random order, in `minibatches` parts of one size.

    With one minibatch the order stays. 8 sequences, 2 epochs, 4 minibatches -> 8 times 2 sequences.
    """
    rng = random.Random(seed)
    size = len(sequences) // minibatches
    for _ in range(epochs):
        order = list(sequences)
        if minibatches > 1:
            rng.shuffle(order)
        yield from (order[start : start + size] for start in range(0, size * minibatches, size))


def _episode_sequence(episode: Episode, advantage: float, per_sequence_mean: bool) -> TrainSequence:
    completion = episode.completion
    num_prompt, num_targets = len(completion.prompt_token_ids), len(completion.token_ids)
    # A token whose log-prob the generator could not tell has no ratio: it is no target.
    is_scored = np.isfinite(np.asarray(completion.logprobs, np.float32))
    num_scored = max(1, int(is_scored.sum()))
    weight = 1.0 / num_scored if per_sequence_mean else 1.0
    prompt_zeros = np.zeros(num_prompt, np.float32)

    def after_prompt(values: Any) -> NDArray[np.float32]:
        """Zeros for the prompt, then the values."""
        return np.concatenate([prompt_zeros, np.asarray(values, np.float32)])

    return TrainSequence(
        token_ids=np.concatenate(
            [
                np.asarray(completion.prompt_token_ids, np.int32),
                np.asarray(completion.token_ids, np.int32),
            ]
        ),
        loss_mask=after_prompt(is_scored) > 0,
        advantages=after_prompt(np.full(num_targets, advantage)),
        generator_logprobs=after_prompt(np.where(is_scored, completion.logprobs, 0.0)),
        token_weights=after_prompt(np.full(num_targets, weight)),
        temperature=completion.temperature,
    )
