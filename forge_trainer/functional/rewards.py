"""Rewards on text: a completion and its prompt in, a number out. No tokens, no model.

A user's own reward is any function of the same form, named in the config as "package.module:name".
It may be async, and it may take the texts of a whole group and return a number for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forge_trainer.errors import ConfigError
from forge_trainer.types import Prompt, RewardFn

from .named import import_callable, is_async

GROUP_PARAMETERS = ("texts", "completions", "texts_G", "completions_G")
"""A function whose first parameter is one of these takes a group."""


def exact_match(completion: str, prompt: Prompt) -> float:
    """1.0 if the completion is the answer, white space around it aside; else 0.0."""
    return float(completion.strip() == prompt.answer)


def starts_with_answer(completion: str, prompt: Prompt) -> float:
    """1.0 if the completion begins with the answer, white space before it aside; else 0.0."""
    return float(completion.lstrip().startswith(prompt.answer))


REWARDS: dict[str, RewardFn] = {
    "exact_match": exact_match,
    "starts_with_answer": starts_with_answer,
}
"""So cheap that they are called where they are needed."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A function that judges, and how it is to be called."""

    function: Callable[..., Any]
    takes_group: bool = False
    """(texts of a group, prompt) -> a number for each; else (text, prompt) -> a number."""

    @property
    def is_cheap(self) -> bool:
        return self.function in REWARDS.values()

    @property
    def is_async(self) -> bool:
        return is_async(self.function)


def as_reward(function: Callable[..., Any], *, takes_group: bool | None = None) -> Reward:
    """The function as a reward; None: its first parameter's name tells if it takes a group."""
    if takes_group is None:
        takes_group = _first_parameter(function) in GROUP_PARAMETERS
    return Reward(function, takes_group)


def resolve_reward(name: str) -> RewardFn:
    """The reward called `name`, or the function that "package.module:name" points at.

    Raises:
        ConfigError: no such reward, module or function.
    """
    if name in REWARDS:
        return REWARDS[name]
    if not name.partition(":")[2]:
        raise ConfigError(
            f"reward {name!r} is unknown; use one of {sorted(REWARDS)} or 'package.module:function'"
        )
    reward: RewardFn = import_callable("reward", name)
    try:
        inspect.signature(reward).bind("", Prompt("", ""))
    except TypeError as error:
        raise ConfigError(
            f"reward {name!r} cannot be called with (completion, prompt): {error}"
        ) from None
    except ValueError:
        # It says nothing of its parameters.
        pass
    return reward


def _first_parameter(function: Callable[..., Any]) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None)
    except (TypeError, ValueError):
        return None
