"""The numbers of a batch: what was sampled, how old it was, what the updates said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from forge_trainer.metrics import merge_metrics, metric_values
from forge_trainer.replay import Group, Replay
from forge_trainer.types import TrainSequence, TrainStepResult
from forge_trainer.types.arrays import as_array

from .mismatch import count_unscored
from .rollout import episodes_of, has_signal
from .weight_sync import SyncReport


def staleness_metrics(
    groups: Sequence[Group], replay: Replay, *, policy_version: int
) -> dict[str, float]:
    """How old, in updates, the tokens are that are about to be trained on, and what waits."""
    versions = np.concatenate(
        [
            as_array(transcript.policy_versions)[as_array(transcript.sampled)]
            for episode in episodes_of(groups)
            for transcript in episode.transcripts
        ]
    )
    ages = policy_version - versions
    return {
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
        "staleness/limit": replay.max_age,
        "replay/finished": replay.num_finished,
        "replay/sampling": replay.num_sampling,
        "replay/dropped": replay.num_dropped,
        "replay/replaced": replay.num_replaced,
        "replay/abandoned": replay.num_abandoned,
    }


def advantage_metrics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Mean and standard deviation over episodes, each of which has one advantage."""
    advantages = np.array([np.asarray(s.advantages)[-1] for s in sequences])
    return {"advantage/mean": float(advantages.mean()), "advantage/std": float(advantages.std())}


def batch_metrics(
    groups: Sequence[Group], results: Sequence[TrainStepResult], sync: SyncReport | None
) -> dict[str, float]:
    """One flat row of numbers for the updates of a batch; times are added by the loop."""
    episodes = list(episodes_of(groups))
    counted = [episode for episode in episodes if not episode.excluded]
    passes = [result.forward_backward for result in results]
    optim = [result.optim for result in results]
    values = metric_values(merge_metrics(one.metrics for one in passes))
    values |= metric_values(merge_metrics(one.metrics for one in optim))
    mixed = sum(has_signal(group) for group in groups)
    row: dict[str, float] = {
        # First, so that a reward called `mean` takes nobody's place.
        **_means("reward", [e.rewards for e in counted]),
        "step": optim[-1].step,
        "policy_version": min(e.policy_version for e in episodes),
        "reward/mean": _mean([e.reward for e in counted]),
        "reward/groups_with_signal": mixed / len(groups),
        "rollout/completion_tokens": _mean([e.num_sampled for e in episodes]),
        "rollout/stopped": _mean([float(e.status == "completed") for e in episodes]),
        "rollout/truncated": _mean([float(e.status.startswith("truncated")) for e in episodes]),
        "rollout/failed": _mean([float(e.status == "failed") for e in episodes]),
        "rollout/excluded": 1 - len(counted) / len(episodes),
        "rollout/turns": _mean([float(e.num_turns) for e in episodes]),
        **_means("environment", [e.metrics for e in episodes]),
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


def _means(area: str, named: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every name over those that have it."""
    names = sorted({name for one in named for name in one})
    return {f"{area}/{n}": _mean([one[n] for one in named if n in one]) for n in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
