"""How the policy is measured on prompts that it does not train on."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveInt, model_validator

from ..section import Section, Seed
from .task import TaskConfig


class EvalConfig(Section):
    """Held-out prompts, answered by the run's own generators beside training."""

    every: PositiveInt
    """Updates between two evaluations; the last step is always evaluated."""
    at_start: bool = True
    """Also before the first update."""
    num_prompts: PositiveInt = 64
    completions: PositiveInt = 1
    """Answers to each prompt."""
    greedy: bool = True
    """The likeliest token each time; False samples at `temperature`."""
    temperature: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    pass_at: list[PositiveInt] = [1]
    """Each k of pass@k."""
    pass_reward: float = 1.0
    """The reward from which on an answer is right."""
    task: TaskConfig | None = None
    """Where the prompts come from; None: the run's task, with another seed."""
    seed: Seed = 1_000_003
    """Of the prompts and of sampling."""

    @model_validator(mode="after")
    def answers_are_enough_and_differ(self) -> Self:
        if max(self.pass_at, default=1) > self.completions:
            raise ValueError(
                f"pass_at: {max(self.pass_at)} needs as many completions of a prompt, got "
                f"completions: {self.completions}"
            )
        if self.greedy and self.completions > 1:
            raise ValueError(
                f"completions: {self.completions} greedy answers to a prompt are all the same; "
                "give greedy: false, or completions: 1"
            )
        return self
