"""The tokens of an episode as they come: what was shown to the model, and what it sampled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from forge_trainer.types import Completion, Transcript
from forge_trainer.types.arrays import PerToken, as_array

NOT_SAMPLED = -1


class Conversation:
    """One training sequence that grows: only ever appended to, sampled tokens as they were."""

    def __init__(self, shown: PerToken) -> None:
        self._token_ids = [_whole(shown)]
        self._sampled = [np.zeros(len(shown), bool)]
        self._logprobs = [np.zeros(len(shown), np.float32)]
        self._versions = [np.full(len(shown), NOT_SAMPLED, np.int32)]
        self._temperature = 1.0

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """All so far."""
        return np.concatenate(self._token_ids)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._token_ids))

    @property
    def num_sampled(self) -> int:
        return sum(int(part.sum()) for part in self._sampled)

    def show(self, token_ids: PerToken) -> None:
        """Append what the model did not say."""
        more = Conversation(token_ids)
        self._token_ids += more._token_ids
        self._sampled += more._sampled
        self._logprobs += more._logprobs
        self._versions += more._versions

    def add(self, completion: Completion) -> None:
        """Append what the model sampled after all that stands here."""
        self._token_ids.append(_whole(completion.token_ids))
        self._sampled.append(np.ones(len(completion.token_ids), bool))
        self._logprobs.append(as_array(completion.logprobs).astype(np.float32))
        self._versions.append(_whole(completion.policy_versions))
        self._temperature = completion.temperature

    def transcript(self) -> Transcript:
        """What came of it up to the last sampled token: later ones are nobody's context."""
        sampled = np.concatenate(self._sampled)
        end = int(np.flatnonzero(sampled)[-1]) + 1 if sampled.any() else len(sampled)
        return Transcript(
            token_ids=self.token_ids[:end],
            sampled=sampled[:end],
            logprobs=np.concatenate(self._logprobs)[:end],
            policy_versions=np.concatenate(self._versions)[:end],
            temperature=self._temperature,
        )


def _whole(numbers: PerToken) -> NDArray[np.int32]:
    return as_array(numbers).astype(np.int32)
