"""One request that is being sampled: its tokens so far, and whether it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream

from forge_trainer.types import Completion, GenerationRequest, StopReason


class StopStrings:
    """Looks for stop strings in a text that grows by tokens, also where they span several."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._overlap = max(len(string) for string in stop) - 1
        self._text = ""

    def find(self, token_id: int) -> str | None:
        """The text before the first stop string, once this token has completed one."""
        more = self._decode(token_id)
        if more is None:
            return None
        start = max(len(self._text) - self._overlap, 0)
        self._text += more
        found = [at for string in self._stop if (at := self._text.find(string, start)) >= 0]
        return self._text[: min(found)] if found else None

    def _decode(self, token_id: int) -> str | None:
        """What the text grows by; None while a character is incomplete."""
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            if not str(error).startswith("Invalid prefix"):
                raise
            # tokenizers 0.22: bytes that are no UTF-8 may decode otherwise once more have come.
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token_id)


NUMBERS = np.dtype(
    [
        ("token", np.int32),
        ("length", np.int64),
        ("sampled", np.int64),
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("greedy", np.bool_),
    ]
)
"""What a step computes with, of every row: its last token, how many before that have keys and
values, how many it has sampled; and what it is sampled with."""


@dataclass(eq=False, slots=True)
class Row:
    """A request that is being sampled."""

    request: GenerationRequest
    prompt: NDArray[np.int32]
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None
    """None while it runs."""
    text: str | None = None
    """Before the stop string that ended it; None: all of it."""

    @property
    def limit(self) -> int:
        """Tokens that it can become, with its prompt."""
        return len(self.prompt) + self.request.sampling.max_completion_tokens

    @property
    def known_ids(self) -> NDArray[np.int32]:
        """The tokens that have keys and values: all but the last."""
        return np.concatenate([self.prompt, np.array(self.token_ids[:-1], np.int32)])

    def take(self, token_id: int, logprob: float, policy_version: int) -> None:
        """Another token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.policy_versions.append(policy_version)
        if self.stop_strings is not None:
            self.text = self.stop_strings.find(token_id)
        if token_id in self.stop_ids or self.text is not None:
            self.stop_reason = "stop"
        elif len(self.token_ids) >= self.request.sampling.max_completion_tokens:
            self.stop_reason = "length"

    def completion(self, tokenizer: Any) -> Completion:
        """What is answered; it has ended."""
        assert self.stop_reason is not None
        text = self.text
        if text is None:
            text = str(tokenizer.decode(self.token_ids, skip_special_tokens=True))
        return Completion(
            prompt_token_ids=self.prompt,
            token_ids=np.array(self.token_ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            policy_versions=np.array(self.policy_versions, np.int32),
            text=text,
            temperature=self.request.sampling.temperature,
            stop_reason=self.stop_reason,
        )


def first_numbers(rows: Sequence[Row]) -> NDArray[Any]:
    """`NUMBERS` of rows that have sampled nothing yet."""
    return np.array(
        [
            (
                row.prompt[-1],
                len(row.prompt) - 1,
                0,
                row.request.seed % 2**64,
                row.request.sampling.temperature,
                row.request.sampling.greedy,
            )
            for row in rows
        ],
        NUMBERS,
    )
