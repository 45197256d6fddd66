"""From a group of episodes to the sequences a trainer learns from."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np

from forge_trainer.types import Episode, TrainSequence
from forge_trainer.types.arrays import as_array

from .advantages import group_advantages


def group_sequences(
    episodes_G: Sequence[Episode], *, divide_by_std: bool, per_sequence_mean: bool
) -> list[TrainSequence]:
    """A sequence per transcript; what the model sampled with a finite log-prob is a target, and
    nothing else.

    With `per_sequence_mean`, each token weighs 1/|o_i|, where o_i is all that was sampled in its
    episode, so that a sum over sequences is a sum of means (use normalize="sequences").
    Episodes that are excluded give nothing, and count in nobody's advantage.
    """
    counted = [episode for episode in episodes_G if not episode.excluded]
    if not counted:
        return []
    advantages = group_advantages([e.reward for e in counted], divide_by_std=divide_by_std)
    return [
        sequence
        for episode, advantage in zip(counted, advantages, strict=True)
        for sequence in _sequences_of(episode, advantage, per_sequence_mean)
    ]


def deal_minibatches(
    sequences: Sequence[TrainSequence], *, epochs: int, minibatches: int, seed: str
) -> Iterator[Sequence[TrainSequence]]:
    """Every epoch's sequences in a new random order, in `minibatches` parts that differ by one at
    most.

    With one minibatch the order stays. 9 sequences, 1 epoch, 4 minibatches -> 2, 2, 2, 3 sequences.
    """
    rng = random.Random(seed)
    ends = [len(sequences) * part // minibatches for part in range(minibatches + 1)]
    for _ in range(epochs):
        order = list(sequences)
        if minibatches > 1:
            rng.shuffle(order)
        yield from (order[start:end] for start, end in itertools.pairwise(ends))


def _sequences_of(
    episode: Episode, advantage: float, per_sequence_mean: bool
) -> Iterator[TrainSequence]:
    # A token whose log-prob the generator could not tell has no ratio: it is no target.
    targets = [
        as_array(transcript.sampled).astype(bool) & np.isfinite(as_array(transcript.logprobs))
        for transcript in episode.transcripts
    ]
    num_targets = max(1, sum(int(mask.sum()) for mask in targets))
    weight = np.float32(1.0 / num_targets if per_sequence_mean else 1.0)
    zero = np.float32(0)
    for transcript, mask in zip(episode.transcripts, targets, strict=True):
        yield TrainSequence(
            token_ids=transcript.token_ids,
            loss_mask=mask,
            advantages=np.where(mask, np.float32(advantage), zero),
            generator_logprobs=np.where(mask, as_array(transcript.logprobs), zero),
            token_weights=np.where(mask, weight, zero),
            temperature=transcript.temperature,
        )
