"""What goes to a generator, and what comes back."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass
from typing import Any, Self

from forge_trainer.config.rollout.generation import REFUSED_SAMPLING
from forge_trainer.errors import DataError

from .arrays import EqualByValue, PerToken, as_array
from .messages import StopReason
from .numbers import require_number


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are sampled.

    Top-p, top-k and min-p are refused, with the reason: they make the ratio a lie.
    """

    max_completion_tokens: int
    temperature: float = 1.0
    num_completions: int = 1
    """Completions per prompt (the group size G)."""
    greedy: bool = False
    """The likeliest token each time; log-probs are still those at `temperature`."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion. Their tokens belong to it; its text ends before them."""

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
class GenerationRequest(EqualByValue):
    """One completion that is wanted: `sampling.num_completions` says nothing here."""

    token_ids: PerToken
    """The prompt."""
    sampling: SamplingParams
    seed: int = 0
    """Of this request's own random numbers: what else is sampled beside it changes nothing."""
    group: str = ""
    """Requests that begin alike should have one name, so that they meet where their prefix is."""
    id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True, eq=False)
class Completion(EqualByValue):
    """What a generator answers, with the log-probs of the distribution it was sampled from."""

    prompt_token_ids: PerToken
    token_ids: PerToken
    logprobs: PerToken
    """One per completion token, in nats, at `temperature`."""
    policy_versions: PerToken
    """One per completion token: that of the weights that it was sampled with."""
    text: str
    temperature: float
    stop_reason: StopReason

    @property
    def policy_version(self) -> int:
        """Of its oldest token."""
        return int(as_array(self.policy_versions).min())

    @property
    def stopped(self) -> bool:
        """True: ended by itself. False: cut at the length limit."""
        return self.stop_reason == "stop"
