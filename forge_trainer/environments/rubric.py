"""How the episodes of a group are judged: named rewards, weighted and summed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge_trainer.config import TASK_REWARD, EnvironmentConfig
from forge_trainer.errors import ConfigError
from forge_trainer.functional.rewards import Reward, as_reward, resolve_reward
from forge_trainer.types import Prompt

from .failures import EpisodeError, Failures, within
from .reward_calls import Answer, call_reward, read_group, read_number
from .reward_pool import RewardPool

SINGLE_TURN = "single_turn"


@dataclass(frozen=True, slots=True)
class Rubric:
    """The rewards of a run by name, and what each weighs. What fails is counted."""

    functions: Mapping[str, Reward]
    weights: Mapping[str, float]
    """What is not named, such as what an environment gives by itself, weighs 1."""
    timeout_s: float
    retries: int
    pool: RewardPool
    failures: Failures

    def total(self, rewards: Mapping[str, float]) -> float:
        """The weighted sum."""
        return sum(self.weights.get(name, 1.0) * reward for name, reward in rewards.items())

    async def ask(self, texts_G: Sequence[str], prompt: Prompt) -> list[dict[str, Answer]]:
        """What every function says of every text, by name; all functions at once."""
        names = list(self.functions)
        asked = (self._ask_again(name, texts_G, prompt) for name in names)
        answers = await asyncio.gather(*asked)
        return [
            {name: of_all[i] for name, of_all in zip(names, answers, strict=True)}
            for i in range(len(texts_G))
        ]

    async def close(self) -> None:
        await self.pool.close()

    async def _ask_again(self, name: str, texts: Sequence[str], prompt: Prompt) -> list[Answer]:
        """With as many retries as the config grants, of what failed."""
        answers = await self._ask(name, texts, prompt)
        for _ in range(self.retries):
            failed = self._count(name, answers)
            if not failed:
                return answers
            asked = range(len(texts)) if self.functions[name].takes_group else failed
            again = await self._ask(name, [texts[i] for i in asked], prompt)
            for i, answer in zip(asked, again, strict=True):
                answers[i] = answer
        self._count(name, answers)
        return answers

    def _count(self, name: str, answers: Sequence[Answer]) -> list[int]:
        """Which of them are none."""
        failed = [i for i, answer in enumerate(answers) if isinstance(answer, str)]
        for i in failed:
            self.failures.count(EpisodeError(name, str(answers[i])))
        return failed

    async def _ask(self, name: str, texts: Sequence[str], prompt: Prompt) -> list[Answer]:
        reward = self.functions[name]
        if reward.is_cheap:
            return call_reward(reward, texts, prompt)
        if reward.is_async:
            return await self._ask_async(name, reward, texts, prompt)
        return await self.pool.ask(name, texts, prompt)

    async def _ask_async(
        self, name: str, reward: Reward, texts: Sequence[str], prompt: Prompt
    ) -> list[Answer]:
        async def one(*arguments: Any) -> Any:
            return await within(
                self.timeout_s, lambda: reward.function(*arguments), name=name, verb=""
            )

        try:
            if reward.takes_group:
                return read_group(await one(list(texts), prompt), len(texts))
        except EpisodeError as failed:
            return [failed.what] * len(texts)
        found = await asyncio.gather(*(one(t, prompt) for t in texts), return_exceptions=True)
        return [_read(one) for one in found]


def make_rubric(
    config: EnvironmentConfig, task_reward: Callable[..., Any] | None, failures: Failures
) -> Rubric:
    """The rewards that the config names; without a function among them, the task's own as `task`.

    Raises:
        ConfigError: one cannot be found, called or sent to the processes of rewards.
    """
    named = {name: one for name, one in config.rewards.items() if one.function is not None}
    functions: dict[str, Reward] = {}
    for name, one in named.items():
        try:
            functions[name] = _resolve(str(one.function), one.group, task_reward)
        except ConfigError as error:
            raise ConfigError(f"environment.rewards.{name}: {error}") from error
    if not named and task_reward is not None:
        functions = {TASK_REWARD: as_reward(task_reward)}
    if not functions and config.name == SINGLE_TURN:
        raise ConfigError(
            "nothing judges: environment single_turn gives no rewards, and neither task.reward nor "
            "environment.rewards names a function; add one"
        )
    far = {name: r for name, r in functions.items() if not (r.is_cheap or r.is_async)}
    return Rubric(
        functions=functions,
        weights={name: one.weight for name, one in config.rewards.items()},
        timeout_s=config.reward_timeout_s,
        retries=config.retries,
        pool=RewardPool(
            far, num_processes=config.reward_processes, timeout_s=config.reward_timeout_s
        ),
        failures=failures,
    )


def _resolve(name: str, group: bool | None, task_reward: Callable[..., Any] | None) -> Reward:
    if name != TASK_REWARD:
        return as_reward(resolve_reward(name), takes_group=group)
    if task_reward is None:
        raise ConfigError("the task has no reward of its own; give task.reward")
    return as_reward(task_reward, takes_group=group)


def _read(found: Any) -> Answer:
    if isinstance(found, EpisodeError):
        return found.what
    if isinstance(found, BaseException):
        raise found
    return read_number(found)
