"""Rewards on text: a completion and its prompt in, a number out. No tokens, no model.

A user's own reward is any function of the same form, named in the config as "package.module:name".
"""

from __future__ import annotations

import inspect

from forge_trainer.errors import ConfigError
from forge_trainer.types import Prompt, RewardFn

from .named import import_callable


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
    if inspect.iscoroutinefunction(reward):
        raise ConfigError(f"reward {name!r} is async; give a plain function that returns a number")
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
