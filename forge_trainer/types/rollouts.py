"""What goes to a generator and comes back judged: prompts, completions, episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from forge_trainer.config.generation import REFUSED_SAMPLING
from forge_trainer.errors import DataError

from .arrays import EqualByValue, PerToken
from .numbers import require_number


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question for the model, as text, with what the reward needs to judge the answer."""

    text: str
    answer: str
    task: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are sampled.

    Top-p, top-k and min-p are refused, with the reason: they make the ratio a lie.
    """

    max_completion_tokens: int
    temperature: float = 1.0
    num_completions: int = 1
    """Completions per prompt (the group size G)."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Raises DataError for what others take here, with the reason."""
        for name in REFUSED_SAMPLING.keys() & kwargs.keys():
            raise DataError(f"SamplingParams: {name} is refused: {REFUSED_SAMPLING[name]}")
        # Not super(): a dataclass with slots is another class than the one defined here.
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Raises DataError for values that nothing can be sampled with."""
        for name in ("max_completion_tokens", "temperature", "num_completions"):
            require_number(name, getattr(self, name), lambda x: x > 0, "above 0")


@dataclass(frozen=True, slots=True, eq=False)
class Completion(EqualByValue):
    """What a generator answers, with the log-probs of the distribution it was sampled from."""

    prompt_token_ids: PerToken
    token_ids: PerToken
    logprobs: PerToken
    """One per completion token, in nats, at `temperature`."""
    text: str
    policy_version: int
    temperature: float
    stopped: bool
    """True: ended by a stop token. False: cut at the length limit."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A completion with its reward; episodes of one prompt share `group_id`."""

    prompt: Prompt
    completion: Completion
    reward: float
    group_id: int


RewardFn = Callable[[str, Prompt], float]
"""(completion text, its prompt) -> reward"""
