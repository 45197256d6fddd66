"""The episodes of a run: acted, judged by group, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from forge_trainer.config import EnvironmentConfig, FixedReward
from forge_trainer.errors import RolloutError
from forge_trainer.tasks import first_error
from forge_trainer.types import Episode, EpisodeStatus, Message, Prompt

from .acting import Acting, ActingRules, Generate, Place
from .failures import EpisodeError
from .reward_calls import Answer
from .rubric import Rubric

MOST_LOST_IN_A_ROW = 64
"""Groups that may have to be replaced with none between them that stays: then nothing works."""


class Driver(Protocol):
    """What carries episodes through: an environment, or an agent that asks for completions."""

    async def drive(self, acting: Acting) -> EpisodeStatus:
        """Let the model speak and be answered, kept in `acting`; how it ended.

        Several at one time. One that is cancelled leaves nothing behind.

        Raises:
            EpisodeError: the environment, the agent or the chat template failed.
        """
        ...

    async def close(self) -> None:
        """No further episode comes."""
        ...


class EpisodeRunner:
    """Makes the episodes of a run: who drives them, limits, rewards, failures.

    Its verbs may run at once, as many as one likes. A caller that is cancelled leaves no request
    and no environment behind.
    """

    def __init__(self, driver: Driver, rules: ActingRules, rubric: Rubric) -> None:
        self._driver = driver
        self._rules = rules
        self._rubric = rubric
        self._num_replaced = 0
        self._lost_in_a_row = 0

    @property
    def _config(self) -> EnvironmentConfig:
        return self._rules.limits

    def count_tokens(self, prompt: Prompt) -> int:
        """Of a prompt as the opening of a conversation."""
        messages = prompt.messages or (Message("user", prompt.text),)
        return len(self._rules.renderer.render(messages, ()))

    async def run_group(
        self, generate: Generate, prompt: Prompt, *, group_id: int, group_size: int
    ) -> list[Episode] | None:
        """`group_size` judged episodes of a prompt; None: too few are left, take another prompt.

        Raises:
            RolloutError: something failed, and the config says that this ends the run.
        """
        async with first_error() as group:
            tasks = [
                group.create_task(
                    self.run_episode(generate, prompt, group_id=group_id, index=index),
                    name=f"episode {group_id}.{index}",
                )
                for index in range(group_size)
            ]
        return await self.judge_group([task.result() for task in tasks])

    async def run_episode(
        self, generate: Generate, prompt: Prompt, *, group_id: int, index: int
    ) -> Episode:
        """One episode with what its environment gave; the functions' rewards are still missing.

        The seed of each of its requests is `request_seed(run seed, group_id, index, turn)`.

        Raises:
            RolloutError: as above.
        """
        place = Place(prompt, group_id, index)
        for attempts_left in reversed(range(self._config.retries + 1)):
            acting = Acting(self._rules, place, generate)
            try:
                return acting.episode(await self._act(acting))
            except EpisodeError as failed:
                self._rubric.failures.count(failed)
                if not attempts_left:
                    self._end_run_if_asked(failed, prompt)
        return acting.episode("failed")

    async def judge_group(self, episodes_G: Sequence[Episode]) -> list[Episode] | None:
        """The episodes of one prompt with all their rewards; None as above.

        What failed before anything was sampled is left out. What is left out of training, too,
        but has been sampled stays, as `excluded`; without a reward of its own, that is NaN.

        Raises:
            RolloutError: as above.
        """
        sampled = [episode for episode in episodes_G if episode.transcripts]
        acted = [episode for episode in sampled if episode.status != "failed"]
        answers = iter(await self._ask_rubric(acted))
        group = [
            self._valued(e if e.status == "failed" else self._judged(e, next(answers)))
            for e in sampled
        ]
        if sum(not episode.excluded for episode in group) >= self._config.min_group:
            self._lost_in_a_row = 0
            return group
        self._lose_group(episodes_G)
        return None

    def take_counts(self) -> dict[str, float]:
        """What happened since the last call, as metrics: `failures/<name>` and the like."""
        rubric, replaced, self._num_replaced = self._rubric, self._num_replaced, 0
        lost, rubric.pool.num_lost = rubric.pool.num_lost, 0
        failures = {f"failures/{name}": float(n) for name, n in rubric.failures.take().items()}
        return failures | {
            "rollout/groups_replaced": float(replaced),
            "rollout/reward_processes_lost": float(lost),
        }

    async def close(self) -> None:
        """End what drives episodes, and the processes of rewards."""
        try:
            await self._driver.close()
        finally:
            await self._rubric.close()

    async def _act(self, acting: Acting) -> EpisodeStatus:
        """Within the limit of its seconds; raises as the driver does."""
        limit = asyncio.timeout(self._config.max_seconds)
        try:
            async with limit:
                return await self._driver.drive(acting)
        except TimeoutError:
            if not limit.expired():
                raise
            return "truncated_time"

    async def _ask_rubric(self, acted: Sequence[Episode]) -> list[dict[str, Answer]]:
        if not acted:
            return []
        texts = [_last_said(episode) for episode in acted]
        return await self._rubric.ask(texts, acted[0].prompt)

    def _judged(self, episode: Episode, answers: dict[str, Answer]) -> Episode:
        """With what the functions answered; one that is no number makes it a failed one."""
        numbers = {name: one for name, one in answers.items() if isinstance(one, float)}
        rewards = {**episode.rewards, **numbers}
        if len(numbers) == len(answers):
            return replace(episode, rewards=rewards)
        name, what = next((n, one) for n, one in answers.items() if isinstance(one, str))
        self._end_run_if_asked(EpisodeError(name, what), episode.prompt)
        return replace(episode, rewards=rewards, status="failed")

    def _valued(self, episode: Episode) -> Episode:
        """With its reward, or without one and excluded."""
        total = self._rubric.total(episode.rewards)
        if episode.status == "completed":
            return replace(episode, reward=total)
        failed, config = episode.status == "failed", self._config
        policy: object = config.on_failure if failed else config.on_truncated
        if isinstance(policy, FixedReward):
            return replace(episode, reward=policy.reward)
        reward = math.nan if failed else total
        return replace(episode, reward=reward, excluded=policy in ("exclude", "drop"))

    def _end_run_if_asked(self, failed: EpisodeError, prompt: Prompt) -> None:
        if self._config.on_failure == "fail":
            raise RolloutError(
                f"{failed}, at the prompt {prompt.text[:60]!r}; repair it, or let "
                "environment.on_failure and environment.retries say how to go on"
            ) from failed

    def _lose_group(self, episodes_G: Sequence[Episode]) -> None:
        self._num_replaced += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= MOST_LOST_IN_A_ROW:
            statuses = sorted({episode.status for episode in episodes_G})
            last = self._rubric.failures.last
            raise RolloutError(
                f"{self._lost_in_a_row} groups in a row had fewer than environment.min_group="
                f"{self._config.min_group} episodes to train on; the last ones' status: "
                f"{', '.join(statuses)}" + (f"; the last failure: {last}" if last else "")
            )


def _last_said(episode: Episode) -> str:
    """What the functions judge: the model's last message."""
    return next((m.content for m in reversed(episode.messages) if m.role == "assistant"), "")
