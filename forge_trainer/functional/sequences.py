"""From a group of episodes to the sequences a trainer learns from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from forge_trainer.types import Episode, TrainSequence

from .advantages import group_advantages


def group_sequences(
    episodes_G: Sequence[Episode], *, divide_by_std: bool, per_sequence_mean: bool
) -> list[TrainSequence]:
    """One sequence per episode: prompt and completion, every completion token a target.

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
    weight = 1.0 / num_targets if per_sequence_mean else 1.0
    return TrainSequence(
        token_ids=[*completion.prompt_token_ids, *completion.token_ids],
        loss_mask=[0] * num_prompt + [1] * num_targets,
        advantages=[0.0] * num_prompt + [advantage] * num_targets,
        generator_logprobs=[0.0] * num_prompt + list(completion.logprobs),
        token_weights=[0.0] * num_prompt + [weight] * num_targets,
        temperature=completion.temperature,
    )
