"""One episode under way: what was said in it, and turns of model and environment until an end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from forge_trainer.config import EnvironmentConfig
from forge_trainer.functional.seeds import opening_seed, request_seed
from forge_trainer.protocols import Environment
from forge_trainer.types import (
    Completion,
    Episode,
    EpisodeStatus,
    GenerationRequest,
    Message,
    Prompt,
    SamplingParams,
)

from .failures import EpisodeError
from .renderer import Renderer, Tools
from .reward_calls import raised
from .transcripts import Conversation

T = TypeVar("T")
Generate = Callable[[GenerationRequest], Awaitable[Completion]]
"""`generate_one` of a generator or of several."""
RENDERER = "renderer"
"""What a chat template that refuses a conversation is counted as."""


@dataclass(frozen=True, slots=True)
class ActingRules:
    """What all episodes of a run share while they act."""

    limits: EnvironmentConfig
    renderer: Renderer
    sampling: SamplingParams
    """Of every message of the model's; one gets fewer tokens where max_tokens is near."""
    max_prompt_tokens: int
    """Of one request."""
    seed: int
    """Of the run."""

    @property
    def max_tokens(self) -> int:
        """Of a conversation as the model sees it."""
        longest = self.max_prompt_tokens + self.sampling.max_completion_tokens
        return self.limits.max_tokens or longest


@dataclass(frozen=True, slots=True)
class Place:
    """Which episode it is: seeds follow from that."""

    prompt: Prompt
    group_id: int
    index: int


@dataclass
class Acting:
    """An episode so far. Its driver fills it; whatever ends that, `episode` says what came."""

    rules: ActingRules
    place: Place
    generate: Generate
    messages: list[Message] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    num_turns: int = 0
    num_tool_calls: int = 0
    num_malformed_calls: int = 0

    async def act(self, environment: Environment) -> EpisodeStatus:
        """Asks the model, gives what it says to the environment, and so on; how it ended.

        Raises:
            EpisodeError: the environment or the chat template.
        """
        place, limits = self.place, self.rules.limits
        seed = opening_seed(self.rules.seed, group_id=place.group_id)
        opening = await environment.reset(place.prompt, seed)
        tools = opening.tools
        self._begin(opening.messages, tools)
        while (room := self.room(self.conversations[-1].num_tokens)) > 0:
            completion = await self.generate(self._request(room))
            self.conversations[-1].add(completion)
            said = self.hear(completion, tools)
            self.messages.append(said)
            if self.has_too_many_tool_calls:
                return "truncated_tool_calls"
            reply = await environment.step(said, completion.stop_reason)
            self.take(reply.rewards, reply.metrics)
            if reply.done:
                return "completed" if completion.stopped else "truncated_completion"
            if self.num_turns >= limits.max_turns:
                return "truncated_turns"
            self._go_on(completion, reply.messages, tools)
        return "truncated_tokens"

    def episode(self, status: EpisodeStatus) -> Episode:
        """What came of it, not yet judged."""
        tool_calls = {
            "tool_calls": float(self.num_tool_calls),
            "malformed_tool_calls": float(self.num_malformed_calls),
        }
        return Episode(
            prompt=self.place.prompt,
            transcripts=tuple(c.transcript() for c in self.conversations if c.num_sampled),
            reward=0.0,
            group_id=self.place.group_id,
            status=status,
            rewards=self.rewards,
            messages=tuple(self.messages),
            num_turns=self.num_turns,
            metrics=self.metrics | {name: n for name, n in tool_calls.items() if n},
        )

    def room(self, num_shown: int) -> int:
        """Tokens that an answer may have after so many that the model is shown; 0 or less: none."""
        if num_shown > self.rules.max_prompt_tokens:
            return 0
        return min(self.rules.max_tokens - num_shown, self.rules.sampling.max_completion_tokens)

    def hear(self, completion: Completion, tools: Tools) -> Message:
        """What the model said in one more turn."""
        self.num_turns += 1
        parsed = self.rules.renderer.parse(completion, tools)
        self.num_tool_calls += len(parsed.message.tool_calls)
        self.num_malformed_calls += parsed.num_malformed
        return parsed.message

    @property
    def has_too_many_tool_calls(self) -> bool:
        limit = self.rules.limits.max_tool_calls
        return limit is not None and self.num_tool_calls > limit

    def take(self, rewards: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Rewards add up; of metrics, the last ones count."""
        for name, reward in rewards.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + float(reward)
        self.metrics |= {name: float(value) for name, value in metrics.items()}

    def rendered(self, render: Callable[[], T]) -> T:
        """What is rendered.

        Raises:
            EpisodeError: the chat template does not take it.
        """
        try:
            return render()
        except Exception as error:
            raise EpisodeError(RENDERER, raised(error)) from error

    def _begin(self, messages: Sequence[Message], tools: Tools) -> None:
        """A training sequence that begins with all that has been said."""
        self.messages += messages
        token_ids = self.rendered(lambda: self.rules.renderer.render(self.messages, tools))
        self.conversations.append(Conversation(token_ids))

    def _request(self, room: int) -> GenerationRequest:
        place = self.place
        return GenerationRequest(
            token_ids=self.conversations[-1].token_ids,
            sampling=replace(self.rules.sampling, max_completion_tokens=room),
            seed=request_seed(
                self.rules.seed,
                group_id=place.group_id,
                index=place.index,
                turn=self.num_turns,
            ),
            group=str(place.group_id),
        )

    def _go_on(self, completion: Completion, messages: Sequence[Message], tools: Tools) -> None:
        """Append what was answered; where that would rewrite what was seen, begin anew."""
        history, renderer = list(self.messages), self.rules.renderer
        bridge = self.rendered(lambda: renderer.bridge(history, completion, messages, tools))
        if bridge is None:
            self._begin(messages, tools)
            return
        self.messages += messages
        self.conversations[-1].show(bridge)
