"""The rollout loop: prompts in, judged groups of episodes out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from forge_trainer.data.prompts import Task
from forge_trainer.protocols import Generator
from forge_trainer.types import (
    Completion,
    Episode,
    Message,
    Prompt,
    RewardFn,
    SamplingParams,
    Transcript,
)

from .pipeline import Pipeline


async def run_rollout(
    generator: Generator,
    task: Task,
    pipeline: Pipeline,
    *,
    sampling: SamplingParams,
    groups_per_step: int,
) -> None:
    """Takes prompts from the task, waits for the pipeline to want groups, gives groups to it.

    Stopped by cancelling it; ends by itself only with an error.
    """
    group_ids = itertools.count()
    while True:
        await pipeline.wait_to_sample()
        prompts = list(itertools.islice(task.prompts, groups_per_step))
        completions = await generator.generate([p.text for p in prompts], sampling)
        groups = [
            judge_group(prompt, group, task.reward, next(group_ids))
            for prompt, group in zip(prompts, completions, strict=True)
        ]
        await pipeline.add(list(groups))


def judge_group(
    prompt: Prompt, completions_G: Sequence[Completion], reward: RewardFn, group_id: int
) -> list[Episode]:
    """One episode per completion."""
    return [
        Episode(
            prompt,
            (Transcript.of_completion(completion),),
            float(reward(completion.text, prompt)),
            group_id,
            status="completed" if completion.stopped else "truncated_completion",
            messages=(Message("user", prompt.text), Message("assistant", completion.text)),
        )
        for completion in completions_G
    ]


def episodes_of(groups: Sequence[Sequence[Episode]]) -> Iterator[Episode]:
    """All episodes of all groups."""
    return itertools.chain.from_iterable(groups)
