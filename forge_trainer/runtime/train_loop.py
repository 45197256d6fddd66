"""The train loop: groups in, updates and fresh generator weights out, one report per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from forge_trainer.config.schema import AlgorithmConfig
from forge_trainer.functional.sequences import group_sequences
from forge_trainer.metrics import metric_values
from forge_trainer.protocols import Generator, Trainer
from forge_trainer.replay import Group
from forge_trainer.reporting import Reporter
from forge_trainer.types import Episode, TrainSequence, TrainStepResult

from .pipeline import Pipeline
from .rollout import episodes_of
from .weight_sync import SyncReport, sync_weights


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """How long and how."""

    steps: int
    """Updates to make."""
    algorithm: AlgorithmConfig
    checkpoint_interval: int
    """Save every so many steps; 0 never."""


async def run_training(
    trainer: Trainer,
    generator: Generator,
    pipeline: Pipeline,
    reporter: Reporter,
    plan: TrainPlan,
) -> None:
    """Takes groups from the pipeline, waits for a step's worth, gives new weights to the generator.

    Stopped by having made `plan.steps` rounds; a round whose gradient was not finite and was
    skipped counts as one.
    """
    for _ in range(plan.steps):
        start = time.perf_counter()
        groups = await pipeline.take()
        taken = time.perf_counter()
        result = await trainer.train_step(
            sequences_of(groups, plan.algorithm),
            loss=plan.algorithm.loss,
            loss_config=plan.algorithm.loss_options,
            normalize=plan.algorithm.normalize,
        )
        trained = time.perf_counter()
        step = result.optim.step
        sync = None if result.optim.skipped else await sync_weights(trainer, generator)
        await pipeline.finish_step(step=step, generator_version=step)
        if plan.checkpoint_interval and step % plan.checkpoint_interval == 0 and sync is not None:
            await trainer.save()
        row = step_metrics(groups, result, sync)
        row["time/step_s"] = time.perf_counter() - start
        row["time/wait_rollout_s"] = taken - start
        row["time/train_s"] = trained - taken
        row["trainer/tokens_per_s"] = _num_tokens(groups) / row["time/step_s"]
        reporter.report_step(row, list(episodes_of(groups)))


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


def step_metrics(
    groups: Sequence[Group], result: TrainStepResult, sync: SyncReport | None
) -> dict[str, float]:
    """One flat row of numbers for a step; times are added by the loop."""
    episodes = list(episodes_of(groups))
    values = metric_values(result.forward_backward.metrics) | metric_values(result.optim.metrics)
    mixed = sum(len({episode.reward for episode in group}) > 1 for group in groups)
    row: dict[str, float] = {
        "step": result.optim.step,
        "policy_version": min(e.completion.policy_version for e in episodes),
        "reward/mean": _mean([e.reward for e in episodes]),
        "reward/groups_with_signal": mixed / len(groups),
        "rollout/completion_tokens": _mean([len(e.completion.token_ids) for e in episodes]),
        "rollout/stopped": _mean([float(e.completion.stopped) for e in episodes]),
        "trainer/loss": values.pop("loss/mean"),
        "trainer/grad_norm": result.optim.grad_norm,
        "trainer/learning_rate": result.optim.learning_rate,
        "trainer/target_tokens": result.forward_backward.num_target_tokens,
        **values,
    }
    if sync is not None:
        row["weights/push_s"], row["weights/pull_s"] = sync.push_s, sync.pull_s
        row["weights/bytes"] = sync.ref.num_bytes
    return row


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _num_tokens(groups: Sequence[Sequence[Episode]]) -> int:
    return sum(
        len(e.completion.prompt_token_ids) + len(e.completion.token_ids)
        for e in episodes_of(groups)
    )
