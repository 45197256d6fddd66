"""What a run is put together from, as its config says. Starts no process."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forge_trainer.config import EvalConfig, GrpoConfig
from forge_trainer.controller.checks import check_prompts
from forge_trainer.data.prompts import Task, make_task
from forge_trainer.environments import EpisodeRunner, make_episode_runner
from forge_trainer.metrics import metric_values
from forge_trainer.processes.lifecycle import Site
from forge_trainer.processes.rank_logs import RankLogs
from forge_trainer.protocols import Generator
from forge_trainer.replay import Replay
from forge_trainer.reporting import Reporter, Sink
from forge_trainer.reporting.console import ConsoleSink, SummarySink
from forge_trainer.reporting.files import MetricsFile, RolloutsFile, TensorBoardSink
from forge_trainer.run.evaluation import Evaluation
from forge_trainer.run.rollout import SampleGroup
from forge_trainer.run.run_folder import (
    EVALUATIONS_FILE,
    FINAL_FOLDER,
    LOGS_FOLDER,
    METRICS_FILE,
    ROLLOUTS_FILE,
    TENSORBOARD_FOLDER,
)
from forge_trainer.types import Episode, Prompt, SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What is asked in evaluations, and how."""

    config: EvalConfig
    prompts: list[Prompt]
    runner: EpisodeRunner


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Where episodes come from."""

    task: Task
    runner: EpisodeRunner
    held_out: HeldOut | None

    async def close(self) -> None:
        """End the processes of rewards."""
        await self.runner.close()
        if self.held_out is not None:
            await self.held_out.runner.close()

    def evaluation(self, generator: Generator) -> Evaluation | None:
        """Of the held-out prompts, on the run's generators."""
        held_out = self.held_out
        if held_out is None:
            return None
        sample = sampler(held_out.runner, generator, held_out.config.completions)
        return Evaluation(held_out.config, held_out.prompts, sample)

    def counts(self) -> Mapping[str, float]:
        """What happened since the last call."""
        return {**self.runner.take_counts(), **metric_values(self.task.prompts.metrics())}


def needs_reward(config: GrpoConfig) -> bool:
    """True if nothing but the task's own reward can judge."""
    environment = config.environment
    return environment.name == "single_turn" and not environment.rewards


def make_rollouts(config: GrpoConfig, model_dir: Path) -> Rollouts:
    """Prompts, environments and rewards of training and of evaluation.

    Raises:
        ConfigError: something of it cannot be had.
    """
    sampling = SamplingParams(
        max_completion_tokens=config.generator.max_completion_tokens,
        temperature=config.generator.temperature,
        stop=config.generator.stop,
    )
    seed = config.seeded_generator.seed or 0
    task = make_task(config.task, seed=config.run.seed, needs_reward=needs_reward(config))
    runner = _runner(config, task, model_dir, sampling, seed)
    task = check_prompts(task, model_dir, config.generator, count=runner.count_tokens)
    return Rollouts(task, runner, _held_out(config, model_dir, sampling))


def _held_out(config: GrpoConfig, model_dir: Path, sampling: SamplingParams) -> HeldOut | None:
    given = config.eval
    if given is None:
        return None
    asked = (given.task or config.task).model_copy(update={"epochs": 1})
    task = make_task(asked, seed=given.seed, needs_reward=needs_reward(config))
    changed = SamplingParams(
        max_completion_tokens=sampling.max_completion_tokens,
        temperature=given.temperature,
        greedy=given.greedy,
        stop=sampling.stop,
    )
    # What fails or is excluded is counted, and never asked again.
    runner = _runner(config, task, model_dir, changed, given.seed, min_group=0)
    task = check_prompts(task, model_dir, config.generator, count=runner.count_tokens)
    prompts = list(itertools.islice(task.prompts, given.num_prompts))
    if len(prompts) < given.num_prompts:
        logger.warning("eval.num_prompts: %d, but there are %d", given.num_prompts, len(prompts))
    return HeldOut(given, prompts, runner)


def _runner(
    config: GrpoConfig,
    task: Task,
    model_dir: Path,
    sampling: SamplingParams,
    seed: int,
    *,
    min_group: int | None = None,
) -> EpisodeRunner:
    environment = config.environment
    if min_group is not None:
        environment = environment.model_copy(update={"min_group": min_group})
    return make_episode_runner(
        environment,
        task.reward,
        model_dir=model_dir,
        sampling=sampling,
        max_prompt_tokens=config.generator.max_prompt_tokens,
        seed=seed,
    )


def sampler(runner: EpisodeRunner, generator: Generator, group_size: int) -> SampleGroup:
    """What samples and judges one group."""

    async def sample(prompt: Prompt, index: int) -> list[Episode] | None:
        return await runner.run_group(
            generator.generate_one, prompt, group_id=index, group_size=group_size
        )

    return sample


def make_replay(config: GrpoConfig) -> Replay:
    """Slots for what the config lets run ahead."""
    algorithm, ahead = config.algorithm, config.async_
    return Replay(
        groups_per_step=algorithm.groups_per_step,
        max_staleness=ahead.max_staleness,
        updates_per_batch=algorithm.updates_per_batch,
        oversampled=math.ceil(ahead.oversampling * algorithm.groups_per_step),
        max_replaced=ahead.max_replaced_groups,
    )


def site_of(config: GrpoConfig, folder: Path) -> Site:
    """Where the run's processes live, and where they log."""
    logs = RankLogs(str((folder / LOGS_FOLDER).absolute()), config.reporting.log_level)
    return Site(config.launch, config.placement, logs)


def make_reporter(config: GrpoConfig, folder: Path) -> Reporter:
    """All sinks that the config asks for."""
    sinks: list[Sink] = [
        MetricsFile(folder / METRICS_FILE, folder / EVALUATIONS_FILE),
        RolloutsFile(folder / ROLLOUTS_FILE, per_step=config.reporting.rollouts_per_step),
    ]
    if config.reporting.tensorboard:
        sinks.append(TensorBoardSink(folder / TENSORBOARD_FOLDER))
    if config.reporting.console:
        sinks += [SummarySink(folder, folder / FINAL_FOLDER), ConsoleSink(steps=config.run.steps)]
    return Reporter(sinks)
