"""What the rollout loop and the train loop share: the replay, and who may go on when."""

from __future__ import annotations

import asyncio

from forge_trainer.replay import Group, Replay


class Pipeline:
    """Lets rollout run ahead of training as far as the replay's staleness limit allows.

    Groups sampled now, at the generator's version v, are trained on from a later step s. They may
    be made if s - v is within the limit, where s counts the updates of the batch being trained
    and of the full batches that wait.
    """

    def __init__(
        self,
        replay: Replay,
        *,
        groups_per_step: int,
        max_policy_age: int,
        updates_per_batch: int = 1,
    ) -> None:
        self._replay = replay
        self._groups_per_step = groups_per_step
        self._updates_per_batch = updates_per_batch
        self._max_policy_age = max_policy_age
        self._changed = asyncio.Condition()
        self._step = 0
        self._generator_version = 0
        self._is_training = False

    async def wait_to_sample(self) -> None:
        """Return once groups sampled now would be fresh when they are trained on."""
        async with self._changed:
            await self._changed.wait_for(self._may_sample)

    def _may_sample(self) -> bool:
        waiting = self._replay.num_fresh(self._step) // self._groups_per_step
        batches = int(self._is_training) + waiting
        trained_at = self._step + batches * self._updates_per_batch
        return trained_at - self._generator_version <= self._max_policy_age

    async def add(self, groups: list[Group]) -> None:
        """Hand over sampled groups."""
        async with self._changed:
            for group in groups:
                self._replay.add(group)
            self._changed.notify_all()

    async def take(self) -> list[Group]:
        """Wait for the groups of one batch; it counts as being trained until `finish_batch`."""
        async with self._changed:
            while (taken := self._replay.take(self._groups_per_step, self._step)) is None:
                await self._changed.wait()
            self._is_training = True
            self._changed.notify_all()
            return taken

    async def finish_batch(self, *, step: int) -> None:
        """Tell that training is at `step`."""
        async with self._changed:
            self._step = step
            self._is_training = False
            self._changed.notify_all()

    async def set_generator_version(self, policy_version: int) -> None:
        """Tell what the generator runs from now on."""
        async with self._changed:
            self._generator_version = policy_version
            self._changed.notify_all()
