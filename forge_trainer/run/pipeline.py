"""What the rollout loop and the train loop share: the replay, and who waits for what."""

from __future__ import annotations

import asyncio

from forge_trainer.replay import Batch, Group, Replay


class Pipeline:
    """The replay with somebody to wake when it changes."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self._changed = asyncio.Condition()
        self._step = 0
        self._ended = self._stopped = False
        self._sampling: dict[int, asyncio.Task[None]] = {}

    async def admit(self) -> list[int]:
        """Wait for free slots; the numbers of the groups that they are for, all that there are.
        None once nothing more is wanted."""
        async with self._changed:
            while not self._stopped:
                if indices := list(iter(self.replay.admit, None)):
                    return indices
                await self._changed.wait()
            return []

    async def stop(self) -> None:
        """Nothing more is wanted: give up what is being sampled."""
        async with self._changed:
            self._stopped = True
            for task in self._sampling.values():
                task.cancel()
            self._changed.notify_all()

    def watch(self, index: int, task: asyncio.Task[None]) -> None:
        """Cancel `task` if its group is given up."""
        self._sampling[index] = task
        task.add_done_callback(lambda _: self._sampling.pop(index, None))

    async def add(self, index: int, group: Group) -> None:
        """Hand over a finished group."""
        async with self._changed:
            self.replay.add(index, group)
            self._changed.notify_all()

    async def discard(self, index: int) -> None:
        """A group will not come."""
        async with self._changed:
            self.replay.discard(index)
            self._changed.notify_all()

    async def end(self) -> None:
        """No further group will be admitted."""
        async with self._changed:
            self._ended = True
            self._changed.notify_all()

    async def take(self) -> Batch | None:
        """Wait for the groups of one batch; None if they cannot come any more."""
        async with self._changed:
            while (batch := self.replay.take(self._step)) is None:
                if self._ended and not self.replay.num_sampling:
                    return None
                # Some may have been dropped, whose slots are free.
                self._changed.notify_all()
                await self._changed.wait()
            for index in batch.abandoned:
                if (task := self._sampling.get(index)) is not None:
                    task.cancel()
            self._changed.notify_all()
            return batch

    def finish_batch(self, *, step: int) -> None:
        """Tell that training is at `step`."""
        self._step = step

    async def release_batch(self) -> None:
        """Whoever samples from now on uses the weights of the oldest batch that was taken."""
        async with self._changed:
            self.replay.release()
            self._changed.notify_all()
