"""The train loop: groups in, updates and fresh generator weights out, one report per batch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from forge_trainer.config import AlgorithmConfig, GrpoConfig
from forge_trainer.functional.sequences import deal_minibatches, group_sequences
from forge_trainer.protocols import Generator, Trainer
from forge_trainer.replay import Group
from forge_trainer.reporting import Reporter
from forge_trainer.tasks import first_error
from forge_trainer.types import TrainSequence, TrainStepResult

from .batch_metrics import advantage_metrics, batch_metrics, staleness_metrics
from .evaluation import Evaluation
from .mismatch import judge_mismatch
from .pipeline import Pipeline
from .rollout import episodes_of
from .weight_sync import Staged, SyncReport, begin_sync, finish_sync

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """How long and how."""

    steps: int
    """Updates that the trainer has made at the end."""
    algorithm: AlgorithmConfig
    checkpoint_interval: int
    """Save every so many steps; the last one always."""
    async_checkpoints: bool = False
    seed: int = 0
    """Of the minibatches."""

    def is_checkpoint_due(self, before: int, step: int) -> bool:
        """True if an interval ended between the steps."""
        interval = self.checkpoint_interval
        return bool(interval) and step // interval > before // interval

    @classmethod
    def of(cls, config: GrpoConfig) -> TrainPlan:
        """What the config of a run says."""
        trainer, run = config.trainer, config.run
        interval = trainer.checkpoint_interval
        return cls(run.steps, config.algorithm, interval, trainer.async_checkpoints, run.seed)


@dataclass(frozen=True, slots=True)
class Models:
    """What the loop works with."""

    trainer: Trainer
    generator: Generator
    reference: Trainer | None = None
    """Frozen; where the loss has a KL term."""


@dataclass(frozen=True, slots=True)
class Watchers:
    """Who is told of what happens."""

    reporter: Reporter
    evaluation: Evaluation | None = None
    counts: Callable[[], Mapping[str, float]] = dict
    """What rollout has counted since the last call."""


@dataclass(frozen=True, slots=True)
class BatchDone:
    """A batch that was trained on."""

    groups: Sequence[Group]
    results: Sequence[TrainStepResult]
    row: dict[str, float]
    """Numbers that are known already."""
    before: int
    """Updates before it."""


async def run_training(
    models: Models, pipeline: Pipeline, watchers: Watchers, plan: TrainPlan
) -> None:
    """Takes a batch of groups from the pipeline, gives new weights to the generator.

    A batch makes `updates_per_batch` updates. Stopped by having made `plan.steps`; one whose
    gradient was not finite and was skipped counts. Stopped early if the prompts end. Weights travel
    beside the next batch, one version at a time, and a batch is reported once its weights have
    arrived. Returns once the last weights have, and the checkpoint of the last step is complete.
    """
    trainer = models.trainer
    if watchers.evaluation is not None:
        await watchers.evaluation.run_at_start(watchers.reporter)
    step = (await trainer.get_status()).step
    pipeline.finish_batch(step=step)
    saved: int | None = None
    first = step // plan.algorithm.updates_per_batch
    last_index = plan.steps // plan.algorithm.updates_per_batch - 1
    async with first_error() as group:
        last: asyncio.Task[SyncReport | None] | None = None
        for index in range(first, last_index + 1):
            start = time.perf_counter()
            batch = await pipeline.take()
            if batch is None:
                logger.warning("the prompts have come to their end after %d updates", step)
                break
            row = {"time/wait_rollout_s": time.perf_counter() - start}
            if index == last_index:
                await pipeline.stop()
            row |= staleness_metrics(batch.groups, pipeline.replay, policy_version=step)
            row |= watchers.counts()
            groups = batch.groups
            results = await _train_on(groups, models, plan, index, row)
            before, step = step, results[-1].optim.step
            if last is not None:
                await last
            staged = None if step == before else await begin_sync(trainer)
            pipeline.finish_batch(step=step)
            # Before a checkpoint is written: rollout waits for nothing else.
            last = group.create_task(_sync(models, pipeline, staged), name=f"sync {step}")
            if plan.is_checkpoint_due(before, step):
                saving = time.perf_counter()
                await trainer.save(wait=not plan.async_checkpoints)
                row["time/save_s"] = time.perf_counter() - saving
                saved = step
            row["time/step_s"] = time.perf_counter() - start
            num_tokens = sum(episode.num_tokens for episode in episodes_of(groups))
            row["trainer/tokens_per_s"] = num_tokens / row["time/step_s"]
            done = BatchDone(groups, results, row, before=before)
            group.create_task(_report(last, done, watchers), name=f"report {step}")
    if watchers.evaluation is not None:
        await watchers.evaluation.run_at_end(watchers.reporter, step=step)
    await trainer.wait_for_save()
    if saved != step:
        await trainer.save()


async def leave_model(trainer: Trainer, folder: Path) -> None:
    """Write the trained model to `folder`, a Hugging Face directory that transformers loads.

    Raises:
        CheckpointError: it cannot be written.
    """
    await trainer.save(path=str(folder), format="hf")


async def _train_on(
    groups: Sequence[Group],
    models: Models,
    plan: TrainPlan,
    batch_index: int,
    row: dict[str, float],
) -> list[TrainStepResult]:
    """The updates of a batch; how long they took is added to `row`."""
    start = time.perf_counter()
    sequences = sequences_of(groups, plan.algorithm)
    row |= advantage_metrics(sequences)
    if models.reference is not None:
        sequences = await with_logprobs("ref_logprobs", sequences, models.reference)
        row["time/reference_s"] = time.perf_counter() - start
    referred = time.perf_counter()
    if plan.algorithm.recompute_logprobs:
        sequences = await with_logprobs("old_logprobs", sequences, models.trainer)
        row["time/recompute_s"] = time.perf_counter() - referred
    recomputed = time.perf_counter()
    results = await train_batch(models.trainer, sequences, plan, batch_index=batch_index)
    row["time/train_s"] = time.perf_counter() - recomputed
    judge_mismatch(results, plan.algorithm)
    return results


async def _sync(models: Models, pipeline: Pipeline, staged: Staged | None) -> SyncReport | None:
    """Bring the weights of a batch to the generator, and let rollout go on with them."""
    report = None
    if staged is not None:
        report = await finish_sync(staged, models.trainer, models.generator)
    await pipeline.release_batch()
    return report


async def _report(
    syncing: asyncio.Task[SyncReport | None], done: BatchDone, watchers: Watchers
) -> None:
    """Report a batch whose weights have arrived; evaluate them, if that is due."""
    numbers = batch_metrics(done.groups, done.results, await syncing) | done.row
    watchers.reporter.report_step(numbers, list(episodes_of(done.groups)))
    if watchers.evaluation is not None:
        step = int(numbers["step"])
        await watchers.evaluation.run_if_due(watchers.reporter, before=done.before, step=step)


async def train_batch(
    trainer: Trainer, sequences: Sequence[TrainSequence], plan: TrainPlan, *, batch_index: int
) -> list[TrainStepResult]:
    """One update per epoch and minibatch, as in PPO; the generator's log-probs stay the same."""
    algorithm = plan.algorithm
    return [
        await trainer.train_step(
            minibatch,
            loss=algorithm.loss,
            loss_config=algorithm.loss_options,
            normalize=algorithm.normalize,
        )
        for minibatch in deal_minibatches(
            sequences,
            epochs=algorithm.epochs,
            minibatches=algorithm.minibatches,
            seed=f"{plan.seed}/{batch_index}",
        )
    ]


async def with_logprobs(
    field: Literal["ref_logprobs", "old_logprobs"],
    sequences: Sequence[TrainSequence],
    model: Trainer,
) -> list[TrainSequence]:
    """The sequences with the log-probs of a model as it is now, at their own temperatures."""
    logprobs = (await model.forward(sequences)).logprobs
    columns: list[dict[str, Any]] = [{field: values} for values in logprobs]
    return [
        replace(sequence, **column) for sequence, column in zip(sequences, columns, strict=True)
    ]


def sequences_of(groups: Sequence[Group], algorithm: AlgorithmConfig) -> list[TrainSequence]:
    """The training sequences of a step."""
    return [
        sequence
        for group in groups
        for sequence in group_sequences(
            group,
            divide_by_std=algorithm.divide_by_std,
            per_sequence_mean=algorithm.normalize == "sequences",
        )
    ]
