"""Rewards in processes of their own: what computes for long, hangs or crashes holds up nobody.

The texts of a group travel together. Where that fails, each is asked for by itself, so that what
one text does to its reward is not laid at the others' door.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from forge_trainer.errors import ConfigError
from forge_trainer.functional.rewards import Reward
from forge_trainer.types import Prompt

from .reward_calls import Answer, call_here, prepare_process, raised

CALLER = "forge_trainer.environments.reward_calls"
BATCH_SHARE = 0.25
"""Of the time limit of one call, what calls that travel together are meant to take."""

SHORTEST_CALL_S = 1e-6


class RewardPool:
    """Starts its processes with the first call. They leave Ctrl-C to whoever closes the pool.

    Processes are forked from a server that has imported what they need, so that another one is
    there at once where one had to be ended; the server and Python's resource tracker go with the
    process that started them. Like all processes that Python starts this way, they import the
    main module: a script needs its `if __name__ == "__main__":`.
    """

    def __init__(
        self, rewards: Mapping[str, Reward], *, num_processes: int, timeout_s: float
    ) -> None:
        """Raises ConfigError for a reward that cannot be sent to a process."""
        self._pickled = {name: _pickled(name, reward) for name, reward in rewards.items()}
        self._takes_group = {name: reward.takes_group for name, reward in rewards.items()}
        self._num_processes = num_processes
        self._timeout_s = timeout_s
        self._pool: ProcessPool | None = None
        self._one_start = asyncio.Lock()
        self._seconds_per_call: dict[str, float] = {}
        self.num_lost = 0
        """Processes that died of themselves, or of a reward."""

    async def ask(self, name: str, texts: Sequence[str], prompt: Prompt) -> list[Answer]:
        """The answers of a reward, one per text; it never raises."""
        size = len(texts) if self._takes_group[name] else self._calls_together(name)
        parts = [texts[start : start + size] for start in range(0, len(texts), size)]
        answers = await asyncio.gather(*(self._ask(name, part, prompt) for part in parts))
        return [answer for part in answers for answer in part]

    async def close(self) -> None:
        """End the processes, whatever they do."""
        async with self._one_start:
            pool, self._pool = self._pool, None
            if pool is not None:
                await asyncio.to_thread(_end, pool)

    def _calls_together(self, name: str) -> int:
        """As many as have taken a part of the time limit of late."""
        seconds = self._seconds_per_call.get(name, 0.0)
        return max(1, int(BATCH_SHARE * self._timeout_s / max(seconds, SHORTEST_CALL_S)))

    async def _ask(self, name: str, texts: Sequence[str], prompt: Prompt) -> list[Answer]:
        try:
            answers, seconds = await self._run(name, texts, prompt)
        except TimeoutError:
            what = f"took longer than {self._timeout_s:g} s"
        except BrokenProcessPool as error:
            what = f"ended its process: {error}"
        except Exception as error:
            # What cannot be pickled, such as a prompt's metadata.
            what = f"could not be asked: {raised(error)}"
        else:
            self._seconds_per_call[name] = seconds / len(texts)
            return answers
        if len(texts) == 1 or self._takes_group[name]:
            return [what] * len(texts)
        alone = await asyncio.gather(*(self._ask(name, [text], prompt) for text in texts))
        return [answers[0] for answers in alone]

    async def _run(
        self, name: str, texts: Sequence[str], prompt: Prompt
    ) -> tuple[list[Answer], float]:
        """Once more if the process died, which need not be the reward's doing."""
        try:
            return await self._run_once(name, texts, prompt)
        except BrokenProcessPool:
            return await self._run_once(name, texts, prompt)

    async def _run_once(
        self, name: str, texts: Sequence[str], prompt: Prompt
    ) -> tuple[list[Answer], float]:
        pool = await self._started()
        try:
            arguments = (name, list(texts), prompt)
            asked = pool.schedule(call_here, args=arguments, timeout=self._timeout_s)
            found: tuple[list[Answer], float] = await asyncio.wrap_future(asked)
        except (ProcessExpired, BrokenProcessPool, RuntimeError) as error:
            # A RuntimeError: the pool found itself broken before it took the call.
            self.num_lost += 1
            if not pool.active:
                await self._drop(pool)
            raise BrokenProcessPool(str(error)) from error
        return found

    async def _started(self) -> ProcessPool:
        async with self._one_start:
            if self._pool is None:
                self._pool = await asyncio.to_thread(self._start)
            return self._pool

    def _start(self) -> ProcessPool:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([CALLER])
        pool = ProcessPool(
            max_workers=self._num_processes,
            initializer=prepare_process,
            initargs=(self._pickled,),
            context=context,
        )
        # It starts when it is first asked whether it does.
        assert pool.active
        return pool

    async def _drop(self, broken: ProcessPool) -> None:
        async with self._one_start:
            if self._pool is broken:
                self._pool = None
                await asyncio.to_thread(_end, broken)


def _end(pool: Any) -> None:
    pool.stop()
    pool.join()


def _pickled(name: str, reward: Reward) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(reward)
    except Exception as error:
        raise ConfigError(
            f"reward {name!r} cannot be sent to the processes of rewards: {error}; name a function "
            "of a module, or make it async"
        ) from error
    return pickled
