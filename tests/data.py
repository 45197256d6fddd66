"""Training sequences for tests: ragged, reproducible, with every per-token field."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from forge_trainer.types import TrainSequence


def random_sequences(
    num_sequences: int = 12,
    *,
    seed: int = 0,
    max_tokens: int = 20,
    vocab_size: int = 260,
    temperature: float = 0.8,
) -> list[TrainSequence]:
    """Sequences of 1 to `max_tokens` tokens; at least one of them has a target."""
    rng = random.Random(seed)
    sequences = []
    for i in range(num_sequences):
        length = max_tokens if i == 0 else rng.randint(1, max_tokens)
        sequences.append(
            TrainSequence(
                token_ids=[rng.randrange(vocab_size) for _ in range(length)],
                loss_mask=[0] + [int(i == 0 or rng.random() < 0.5) for _ in range(length - 1)],
                advantages=[rng.gauss(0, 1)] * length,
                generator_logprobs=[-5.5 + rng.gauss(0, 0.1) for _ in range(length)],
                temperature=temperature,
            )
        )
    return sequences


def same_numbers(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """True if two lists of arrays hold the same numbers."""
    return len(left) == len(right) and all(map(np.array_equal, left, right))
