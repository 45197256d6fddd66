"""The rollout loop: prompts in, judged groups of episodes out."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence

from forge_trainer.errors import RolloutError
from forge_trainer.replay import Group
from forge_trainer.tasks import first_error, is_cancelled, left_behind
from forge_trainer.types import Episode, Prompt

from .pipeline import Pipeline

SampleGroup = Callable[[Prompt, int], Awaitable[Sequence[Episode] | None]]
"""(prompt, number of its group) -> judged episodes; None if too few of them came to an end"""


async def run_rollout(
    prompts: Iterator[Prompt], sample_group: SampleGroup, pipeline: Pipeline
) -> None:
    """Takes a prompt for every slot that the pipeline has free, gives it a judged group.

    All groups are sampled side by side. Stopped by cancelling it, by the end of the prompts, or by
    an error of any group.
    """
    async with first_error() as sampling:
        ended = False
        while not ended:
            indices = await pipeline.admit()
            if not indices:
                break
            taken = await left_behind(functools.partial(_take, prompts, len(indices)))
            ended = len(taken) < len(indices)
            for index, prompt in zip(indices, taken, strict=False):
                if not pipeline.replay.is_wanted(index):
                    continue
                one = _sample(prompt, index, sample_group, pipeline)
                pipeline.watch(index, sampling.create_task(one, name=f"group {index}"))
            for index in indices[len(taken) :]:
                await pipeline.discard(index)
    await pipeline.end()


def _take(prompts: Iterator[Prompt], number: int) -> list[Prompt]:
    """On a thread: a prompt may have to be read from a file, or made."""
    return list(itertools.islice(prompts, number))


async def _sample(
    prompt: Prompt, index: int, sample_group: SampleGroup, pipeline: Pipeline
) -> None:
    try:
        group = await sample_group(prompt, index)
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        # A task that ends like this is an error for nobody, and its slot would stay taken.
        raise RolloutError(f"group {index} cancelled itself") from error
    if group is None or (not has_signal(group) and pipeline.replay.may_replace()):
        await pipeline.discard(index)
    else:
        await pipeline.add(index, group)


def has_signal(group: Group) -> bool:
    """True if its rewards differ: otherwise all advantages are 0."""
    return len({episode.reward for episode in group if not episode.excluded}) > 1


def episodes_of(groups: Sequence[Group]) -> Iterator[Episode]:
    """All episodes of all groups."""
    return itertools.chain.from_iterable(groups)
