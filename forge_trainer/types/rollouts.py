"""What rollout makes: prompts, transcripts of what was said in tokens, judged episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from .arrays import EqualByValue, PerToken, as_array
from .generation import Completion
from .messages import Message

EpisodeStatus = Literal[
    "completed",
    "truncated_completion",
    "truncated_tokens",
    "truncated_turns",
    "truncated_time",
    "truncated_tool_calls",
    "failed",
]
"""How an episode ended: the environment was done; the last completion was cut at its limit; a limit
on the episode's tokens, turns, seconds or tool calls; something raised, hung or gave no number."""


@dataclass(frozen=True, slots=True)
class PromptKey:
    """Which prompt of its source one is, alike whenever the source is read with the same seed.

    No two prompts of a source have the same epoch and index.
    """

    epoch: int = 0
    """Times that all data was read before."""
    index: int = 0
    """Its row, counted from 0; its number within the epoch where there are no rows."""
    id: str = ""
    """Its name in the data; the index where it has none."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question for the model, as text, with what the reward needs to judge the answer."""

    text: str
    answer: str
    task: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    """A whole conversation to go on from; empty: one user message, the text."""
    key: PromptKey = PromptKey()
    """Given by the source that it comes from."""


@dataclass(frozen=True, slots=True, eq=False)
class Transcript(EqualByValue):
    """The L tokens of one training sequence, and which of them the model sampled.

    An episode has one, and another wherever a chat template rewrites earlier turns.
    """

    token_ids: PerToken
    """[L] int32"""
    sampled: PerToken
    """[L] bool: tokens that the model sampled. They alone are targets."""
    logprobs: PerToken
    """[L] float32, in nats, at `temperature`; 0 where not sampled."""
    policy_versions: PerToken
    """[L] int32: of the weights that a token was sampled with; -1 where not sampled."""
    temperature: float

    @property
    def num_sampled(self) -> int:
        return int(as_array(self.sampled).sum())

    @property
    def policy_version(self) -> int:
        """Of its oldest sampled token."""
        return int(as_array(self.policy_versions)[as_array(self.sampled)].min())

    @classmethod
    def of_completion(cls, completion: Completion) -> Transcript:
        """A prompt and what was sampled after it."""
        num_prompt = len(completion.prompt_token_ids)
        L = num_prompt + len(completion.token_ids)
        logprobs, versions = np.zeros(L, np.float32), np.full(L, -1, np.int32)
        logprobs[num_prompt:] = as_array(completion.logprobs)
        versions[num_prompt:] = as_array(completion.policy_versions)
        token_ids = [as_array(completion.prompt_token_ids), as_array(completion.token_ids)]
        return cls(
            token_ids=np.concatenate(token_ids).astype(np.int32),
            sampled=np.arange(L) >= num_prompt,
            logprobs=logprobs,
            policy_versions=versions,
            temperature=completion.temperature,
        )


@dataclass(frozen=True, slots=True)
class Episode:
    """A prompt and all that came of it, judged. Those of one prompt share `group_id`."""

    prompt: Prompt
    transcripts: tuple[Transcript, ...]
    """In the order of turns; empty for one that failed before anything was sampled."""
    reward: float
    """The weighted sum of `rewards`, or what its status is worth."""
    group_id: int
    status: EpisodeStatus = "completed"
    rewards: Mapping[str, float] = field(default_factory=dict)
    """By name, unweighted."""
    messages: tuple[Message, ...] = ()
    """The whole conversation."""
    num_turns: int = 1
    """Messages of the model's."""
    excluded: bool = False
    """True: reported, but neither trained on nor counted in its group's advantages."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of its environment and its rollout, by name."""

    @property
    def policy_version(self) -> int:
        """Of its oldest token."""
        return min(transcript.policy_version for transcript in self.transcripts)

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled."""
        return sum(transcript.num_sampled for transcript in self.transcripts)

    @property
    def num_tokens(self) -> int:
        """Tokens to train on, prompts included."""
        return sum(len(transcript.token_ids) for transcript in self.transcripts)

    @property
    def text(self) -> str:
        """What the model said, turn by turn."""
        return "\n".join(m.content for m in self.messages if m.role == "assistant")


RewardFn = Callable[[str, Prompt], float]
"""(completion text, its prompt) -> reward"""
GroupRewardFn = Callable[[Sequence[str], Prompt], Sequence[float]]
"""(the completion texts of a group, their prompt) -> a reward for each"""
