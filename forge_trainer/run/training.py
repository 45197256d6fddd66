"""The train loop: groups in, updates and fresh generator weights out, one report per batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forge_trainer.config import AlgorithmConfig, GrpoConfig
from forge_trainer.functional.sequences import deal_minibatches, group_sequences
from forge_trainer.metrics import merge_metrics, metric_values
from forge_trainer.protocols import Generator, Trainer
from forge_trainer.replay import Group
from forge_trainer.reporting import Reporter
from forge_trainer.tasks import first_error
from forge_trainer.types import Episode, TrainSequence, TrainStepResult

from .mismatch import count_unscored, judge_mismatch
from .pipeline import Pipeline
from .rollout import episodes_of
from .weight_sync import Staged, SyncReport, begin_sync, finish_sync


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """How long and how."""

    steps: int
    """Updates to make."""
    algorithm: AlgorithmConfig
    checkpoint_interval: int
    """Save every so many steps; the last one always."""
    async_checkpoints: bool = False
    seed: int = 0
    """Of the minibatches."""

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


async def run_training(
    models: Models, pipeline: Pipeline, reporter: Reporter, plan: TrainPlan
) -> None:
    """Takes a batch of groups from the pipeline, gives new weights to the generator.

    A batch makes `updates_per_batch` updates. Stopped by having made `plan.steps`; one whose
    gradient was not finite and was skipped counts. Weights travel beside the next batch, one
    version at a time, and a batch is reported once its weights have arrived. Returns once the last
    weights have, and the checkpoint of the last step is complete.
    """
    trainer = models.trainer
    step = 0
    saved: int | None = None
    async with first_error() as syncing:
        last: asyncio.Task[None] | None = None
        for index in range(plan.steps // plan.algorithm.updates_per_batch):
            start = time.perf_counter()
            groups = await pipeline.take()
            row = {"time/wait_rollout_s": time.perf_counter() - start}
            results = await _train_on(groups, models, plan, index, row)
            before, step = step, results[-1].optim.step
            if last is not None:
                await last
            staged = None if step == before else await begin_sync(trainer)
            await pipeline.finish_batch(step=step)
            if plan.checkpoint_interval and step // plan.checkpoint_interval > (
                before // plan.checkpoint_interval
            ):
                saving = time.perf_counter()
                await trainer.save(wait=not plan.async_checkpoints)
                row["time/save_s"] = time.perf_counter() - saving
                saved = step
            row["time/step_s"] = time.perf_counter() - start
            row["trainer/tokens_per_s"] = _num_tokens(groups) / row["time/step_s"]
            finishing = _finish_batch(models, pipeline, reporter, staged, (groups, results, row))
            last = syncing.create_task(finishing, name=f"sync {step}")
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


async def _finish_batch(
    models: Models,
    pipeline: Pipeline,
    reporter: Reporter,
    staged: Staged | None,
    batch: tuple[Sequence[Group], Sequence[TrainStepResult], dict[str, float]],
) -> None:
    """Bring the weights of a batch to the generator, and report the batch."""
    groups, results, row = batch
    sync = None
    if staged is not None:
        sync = await finish_sync(staged, models.trainer, models.generator)
        await pipeline.set_generator_version(staged.ref.version.policy_version)
    reporter.report_step(batch_metrics(groups, results, sync) | row, list(episodes_of(groups)))


def advantage_metrics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Mean and standard deviation over episodes, each of which has one advantage."""
    advantages = np.array([np.asarray(s.advantages)[-1] for s in sequences])
    return {"advantage/mean": float(advantages.mean()), "advantage/std": float(advantages.std())}


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


def batch_metrics(
    groups: Sequence[Group], results: Sequence[TrainStepResult], sync: SyncReport | None
) -> dict[str, float]:
    """One flat row of numbers for the updates of a batch; times are added by the loop."""
    episodes = list(episodes_of(groups))
    passes = [result.forward_backward for result in results]
    optim = [result.optim for result in results]
    values = metric_values(merge_metrics(one.metrics for one in passes))
    values |= metric_values(merge_metrics(one.metrics for one in optim))
    mixed = sum(len({episode.reward for episode in group}) > 1 for group in groups)
    row: dict[str, float] = {
        "step": optim[-1].step,
        "policy_version": min(e.completion.policy_version for e in episodes),
        "reward/mean": _mean([e.reward for e in episodes]),
        "reward/groups_with_signal": mixed / len(groups),
        "rollout/completion_tokens": _mean([len(e.completion.token_ids) for e in episodes]),
        "rollout/stopped": _mean([float(e.completion.stopped) for e in episodes]),
        "rollout/unscored_tokens": count_unscored(episodes),
        "trainer/loss": values.pop("loss/mean"),
        "trainer/grad_norm": _mean([one.grad_norm for one in optim]),
        "trainer/learning_rate": optim[-1].learning_rate,
        "trainer/target_tokens": sum(one.num_target_tokens for one in passes),
        **values,
    }
    if sync is not None:
        row["weights/bytes"] = sync.ref.num_bytes
        row["weights/stall_s"] = sync.stall_s
        row["weights/versions_held"] = sync.num_held
        row["weights/readers"] = sync.num_readers
        for name, transfer in (("push", sync.push), ("pull", sync.pull)):
            row[f"weights/{name}_s"] = transfer.seconds
            row[f"weights/{name}_gb_per_s"] = transfer.gb_per_s
    return row


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _num_tokens(groups: Sequence[Sequence[Episode]]) -> int:
    return sum(
        len(e.completion.prompt_token_ids) + len(e.completion.token_ids)
        for e in episodes_of(groups)
    )
