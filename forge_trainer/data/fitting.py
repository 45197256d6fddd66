"""What becomes of a prompt that has more tokens than the model is given."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from forge_trainer.config import OnLongPrompt
from forge_trainer.errors import ConfigError, DataError
from forge_trainer.types import Message, Prompt

logger = logging.getLogger(__name__)

CountTokens = Callable[[Prompt], int]
"""Tokens of a prompt as the model gets it, chat template and all."""


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """How long prompts may be."""

    max_tokens: int
    count: CountTokens
    policy: OnLongPrompt

    def fit(self, prompt: Prompt) -> Prompt | None:
        """The prompt, what is left of it after cutting, or None where it is dropped.

        A prompt of which nothing fits is dropped even where it might be cut.

        Raises:
            DataError: it is too long, and the policy is `error`.
        """
        num_tokens = self.count(prompt)
        if num_tokens <= self.max_tokens:
            return prompt
        if self.policy == "error":
            raise DataError(
                f"prompt {prompt.key.id} of {prompt.task!r} has {num_tokens} tokens, and "
                f"generator.max_prompt_tokens is {self.max_tokens}: {prompt.text[:60]!r}; raise "
                "it, or let task.on_long_prompt be drop or truncate_left"
            )
        return None if self.policy == "drop" else self._truncated(prompt)

    def _truncated(self, prompt: Prompt) -> Prompt | None:
        """The longest end of it that fits.

        Of a conversation, first its oldest turns go, never the system's words; then what the user
        said last is cut.
        """
        if not prompt.messages:
            return self._longest_end(prompt.text, lambda text: replace(prompt, text=text))
        shortest = None
        for shortest in _later_beginnings(prompt.messages):
            if self.count(kept := replace(prompt, messages=shortest)) <= self.max_tokens:
                return kept
        if shortest is None:
            return None
        asked = _first_of_user(shortest)
        return self._longest_end(
            shortest[asked].content, lambda text: _with_content(prompt, shortest, asked, text)
        )

    def _longest_end(self, text: str, prompt_with: Callable[[str], Prompt]) -> Prompt | None:
        """By halving: longer text has more tokens, but for one or two where words are cut."""
        fits, too_long = 0, len(text)
        found = None
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            shorter = prompt_with(text[-middle:])
            if self.count(shorter) <= self.max_tokens:
                fits, found = middle, shorter
            else:
                too_long = middle
        return found


def require_some_fit(first: Sequence[Prompt], limit: PromptLimit) -> None:
    """Look at the first prompts of a source, and say it where some are too long.

    Raises:
        ConfigError: nothing is left of any, or one is too long where all must fit.
    """
    too_long = [prompt for prompt in first if limit.count(prompt) > limit.max_tokens]
    given = f"generator.max_prompt_tokens: {limit.max_tokens}, but of the task's first {len(first)}"
    if too_long and limit.policy == "error":
        longest = max(too_long, key=limit.count)
        raise ConfigError(
            f"{given} prompts the longest has {limit.count(longest)} tokens: "
            f"{longest.text[:60]!r}; give at least as many, or let task.on_long_prompt be drop or "
            "truncate_left"
        )
    if len(too_long) == len(first) and not any(map(limit.fit, first)):
        shortest = min(first, key=limit.count)
        raise ConfigError(
            f"{given} prompts the shortest has {limit.count(shortest)} tokens: "
            f"{shortest.text[:60]!r}; give at least as many"
        )
    if too_long:
        logger.warning(
            "%s prompts %d have more tokens (task.on_long_prompt: %s)",
            given,
            len(too_long),
            limit.policy,
        )


def _first_of_user(messages: tuple[Message, ...]) -> int:
    return next(i for i, message in enumerate(messages) if message.role == "user")


def _later_beginnings(messages: tuple[Message, ...]) -> Iterator[tuple[Message, ...]]:
    """The system's words, then all from one of the user's messages on; the longest first."""
    spoken = [i for i, message in enumerate(messages) if message.role != "system"]
    system = messages[: spoken[0]] if spoken else messages
    for start in spoken:
        if messages[start].role == "user":
            yield system + messages[start:]


def _with_content(
    prompt: Prompt, messages: tuple[Message, ...], number: int, content: str
) -> Prompt:
    """With `content` in place of the message's, and of the text where that was the same."""
    text = content if prompt.text == messages[number].content else prompt.text
    cut = replace(messages[number], content=content)
    return replace(prompt, text=text, messages=(*messages[:number], cut, *messages[number + 1 :]))
