"""What a model acts in, how far, how it is judged, and what becomes of what fails."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from ..section import Seconds, Section

TASK_REWARD = "task"
"""In environment.rewards: the function of task.reward, or the task's own."""


class RewardConfig(Section):
    """One of the rewards that are weighted and summed."""

    function: str | None = None
    """A reward's name, "package.module:function", or `task` for the task's own; None: a reward of
    this name that the environment gives."""
    weight: float = 1.0
    group: bool | None = None
    """True: it takes all texts of a group and returns a reward for each. None: it does if its first
    parameter is called texts or completions."""


class FixedReward(Section):
    """What something is worth, whatever was said."""

    reward: float


class EnvironmentConfig(Section):
    """One episode: its environment, its limits, its rewards, and its failures."""

    name: str = "single_turn"
    """`single_turn`, `guess`, `calculator`, a class of your own as "package.module:name", or
    `agent`: a program of your own that asks for completions over OpenAI's protocol."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's class. Of an agent: `function`, "package.module:name",
    or `command`, a list of words; the server's address, `host`; all else goes to the agent."""
    renderer: Literal["auto", "chat", "text"] = "auto"
    """How messages become tokens: by the chat template of the model's directory, or as their
    contents joined; `auto` takes the template where there is one."""
    chat_template_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template, such as enable_thinking: false."""
    max_turns: PositiveInt = 32
    """Messages of the model's in an episode."""
    max_tokens: PositiveInt | None = None
    """Of a conversation as the model sees it, its own answers included; None is
    generator.max_prompt_tokens + generator.max_completion_tokens."""
    max_seconds: Seconds | None = None
    """Of an episode, waiting for the generator included."""
    max_tool_calls: Annotated[int, Field(ge=0)] | None = None
    """In an episode."""
    step_timeout_s: Seconds = 60.0
    """Of one call of the environment, or of what an agent does between two requests; what takes
    longer has failed."""
    rewards: dict[str, RewardConfig] = Field(default_factory=dict)
    """By name. What the environment gives and is not named here weighs 1; without a function here,
    the task's reward is one of them, as `task`."""
    reward_timeout_s: Seconds = 30.0
    """Of one call of a reward; what takes longer has failed."""
    reward_processes: PositiveInt = 1
    """Processes for rewards that are not forge_trainer's own; started when they are needed."""
    on_truncated: Literal["keep", "exclude"] | FixedReward = "keep"
    """Episodes that were cut at a limit: judge them like others, leave them out of training, or
    give them a fixed reward."""
    on_failure: Literal["fail", "drop"] | FixedReward = "fail"
    """Episodes whose environment or reward raised, hung or gave no number: end the run, leave them
    out of training, or give them a fixed reward."""
    retries: Annotated[int, Field(ge=0)] = 0
    """How often a failed episode is begun anew in a fresh environment, or a reward is asked again,
    before on_failure says what becomes of it."""
    min_group: Annotated[int, Field(ge=1)] = 2
    """A group with fewer episodes left to train on is replaced by another prompt's."""

    @model_validator(mode="after")
    def names_are_of_use(self) -> Self:
        for name, reward in self.rewards.items():
            if reward.function is None and reward.group is not None:
                raise ValueError(
                    f"rewards.{name}.group: {reward.group}, but there is no function; leave it out"
                )
        return self
