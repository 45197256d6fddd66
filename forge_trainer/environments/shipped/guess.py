"""Higher or lower: find a number in few guesses.

    ?    8<    4>    6    (of 1 to 15, 6 is hidden: 8 is too high, 4 too low)

One character is one guess, so that a tiny model with a tokenizer of bytes can learn it from
nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from forge_trainer.types import Message, Opening, Prompt, Reply, StopReason

SYMBOLS = "123456789abcdefghijklmnopqrstuvwxyz"
"""The numbers from 1 on."""
OPENING, LOWER, HIGHER = "?", "<", ">"
"""What the model is asked; the hidden number is lower, or higher, than the guess."""


class Guess:
    """Hides a number of 1 to `largest` for at most `guesses` guesses.

    Rewards: `information`, the share of what there is to know that was found out: of 15 numbers, 8
    and then 4 leave 3 or fewer, so 1 - log 3 / log 15 at least; all of it once the number is named.
    What is no number ends the episode. `solved` is 1 for a named number. Halving what is left finds
    any of 2**k - 1 numbers in k guesses.
    """

    def __init__(self, largest: int = 15, guesses: int = 4) -> None:
        if not 2 <= largest <= len(SYMBOLS):
            raise ValueError(f"largest is {largest}; it must be 2 to {len(SYMBOLS)}")
        if guesses < 1:
            raise ValueError(f"guesses is {guesses}; it must be at least 1")
        self._largest = largest
        self._guesses = guesses

    async def reset(self, task: Prompt, seed: int) -> Opening:
        """The hidden number is the task's answer; without one, it follows from the seed."""
        hidden = task.answer or SYMBOLS[random.Random(seed).randrange(self._largest)]
        self._hidden = SYMBOLS.index(hidden) + 1
        self._lowest, self._highest = 1, self._largest
        self._num_guesses = 0
        return Opening((Message("user", OPENING),))

    async def step(self, message: Message, stop_reason: StopReason) -> Reply:
        self._num_guesses += 1
        said = message.content.strip()
        guess = SYMBOLS.find(said) + 1 if len(said) == 1 else 0
        if not 1 <= guess <= self._largest:
            return self._end(solved=False)
        before = self._entropy()
        if guess == self._hidden:
            return self._end(solved=True, information=before)
        if guess > self._hidden:
            self._highest = min(self._highest, guess - 1)
        else:
            self._lowest = max(self._lowest, guess + 1)
        found = before - self._entropy()
        if self._num_guesses == self._guesses:
            return self._end(solved=False, information=found)
        hint = LOWER if guess > self._hidden else HIGHER
        return Reply((Message("user", hint),), rewards={"information": self._share(found)})

    async def close(self) -> None:
        pass

    def _entropy(self) -> float:
        """Bits that are missing."""
        return math.log2(self._highest - self._lowest + 1)

    def _share(self, bits: float) -> float:
        return bits / math.log2(self._largest)

    def _end(self, *, solved: bool, information: float = 0.0) -> Reply:
        return Reply(
            done=True,
            rewards={"information": self._share(information), "solved": float(solved)},
            metrics={"guesses": float(self._num_guesses)},
        )


def prompts(seed: int, largest: int = 15) -> Iterator[Prompt]:
    """Hidden numbers without end, for `task.name`."""
    rng = random.Random(seed)
    while True:
        yield Prompt(OPENING, SYMBOLS[rng.randrange(largest)], task="guess")
