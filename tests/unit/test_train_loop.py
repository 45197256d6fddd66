"""The train loop on honest fakes: how often a batch is trained on, what is saved and when."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from forge_trainer.config import AlgorithmConfig, EvalConfig
from forge_trainer.errors import MismatchError, WeightsError
from forge_trainer.functional.sequences import deal_minibatches
from forge_trainer.metrics import Last, Max, Mean, Metric, Quantile, SampleSize
from forge_trainer.pieces import WeightsRef, WeightsVersion
from forge_trainer.replay import Replay
from forge_trainer.reporting import Reporter
from forge_trainer.run.evaluation import Evaluation
from forge_trainer.run.pipeline import Pipeline
from forge_trainer.run.rollout import run_rollout
from forge_trainer.run.training import Models, TrainPlan, Watchers, run_training
from forge_trainer.status import TrainerStatus
from forge_trainer.tasks import run_with_background
from forge_trainer.types import (
    Episode,
    ForwardBackwardResult,
    ForwardResult,
    OptimStepResult,
    Prompt,
    TrainSequence,
    TrainStepResult,
)
from tests.data import same_numbers
from tests.unit.test_small_functions import episode
from tests.waiting import A_HANG_S


class FakeTrainer:
    """Counts updates; skips those whose number is in `skips`."""

    def __init__(self, skips: Sequence[int] = ()) -> None:
        self.step = self.calls = 0
        self.skips = skips
        self.trained: list[list[TrainSequence]] = []
        self.saved: list[tuple[int, bool]] = []
        self.pushed: list[int] = []
        self.waited = 0
        self.push_error: Exception | None = None

    async def train_step(self, sequences: Sequence[TrainSequence], **_: Any) -> TrainStepResult:
        self.trained.append(list(sequences))
        self.calls += 1
        skipped = self.calls in self.skips
        self.step += int(not skipped)
        metrics: dict[str, Metric] = {"loss/mean": Mean(float(self.calls), 1.0)}
        return TrainStepResult(
            ForwardBackwardResult(metrics, 3 * len(sequences), len(sequences)),
            OptimStepResult(self.step, float(self.calls), 0.1, skipped, {"trainer/x": Last(1.0)}),
        )

    async def forward(self, sequences: Sequence[TrainSequence]) -> ForwardResult:
        return ForwardResult([np.full(len(s), -0.5, np.float32) for s in sequences])

    async def push_weights(self, *, wait: bool) -> WeightsRef:
        assert not wait
        self.pushed.append(self.step)
        return WeightsRef(WeightsVersion(0, self.step), 1, 4, "float32", "memory")

    async def get_status(self) -> TrainerStatus:
        held = [WeightsVersion(0, step) for step in self.pushed]
        newest = held[-1] if held else None
        return TrainerStatus(self.step, "idle", 0.0, 0, 0, newest, held, None, False, 0, None, None)

    async def wait_for_push(self) -> None:
        if self.push_error is not None:
            raise self.push_error

    async def save(self, *, wait: bool = True) -> None:
        self.saved.append((self.step, wait))

    async def wait_for_save(self) -> None:
        self.waited += 1


class FakeGenerator:
    version = 0

    async def pull_weights(self, ref: WeightsRef) -> None:
        self.version = ref.version.policy_version


class Rows:
    def __init__(self) -> None:
        self.rows: list[Mapping[str, float]] = []
        self.evaluations: list[Mapping[str, float]] = []

    def write_step(self, row: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        self.rows.append(row)

    def write_evaluation(self, row: Mapping[str, float]) -> None:
        self.evaluations.append(row)

    def close(self) -> None:
        pass


def _run(
    plan: TrainPlan,
    trainer: FakeTrainer,
    reference: FakeTrainer | None = None,
    *,
    max_staleness: int = 0,
    eval: EvalConfig | None = None,
) -> Rows:
    """Rollout beside training, as the app runs them, with as many groups as a batch wants."""
    algorithm, generator, rows = plan.algorithm, FakeGenerator(), Rows()
    pipeline = Pipeline(
        Replay(
            groups_per_step=algorithm.groups_per_step,
            max_staleness=max_staleness,
            updates_per_batch=algorithm.updates_per_batch,
        )
    )

    async def sample(prompt: Prompt, index: int) -> list[Episode]:
        version = generator.version
        await asyncio.sleep(0)
        return [episode(float(r), version=version) for r in range(algorithm.group_size)]

    async def scenario() -> None:
        models: Any = Models(trainer, generator, reference)  # type: ignore[arg-type]
        async with asyncio.timeout(A_HANG_S):
            evaluation = None if eval is None else Evaluation(eval, [Prompt("", "")] * 3, sample)
            watchers = Watchers(Reporter([rows]), evaluation)
            training = run_training(models, pipeline, watchers, plan)
            prompts = itertools.repeat(Prompt("", ""))
            await run_with_background(training, run_rollout(prompts, sample, pipeline))

    asyncio.run(scenario())
    return rows


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_batch_is_trained_on_in_epochs_and_minibatches(max_staleness: int) -> None:
    algorithm = AlgorithmConfig(group_size=4, groups_per_step=2, epochs=2, minibatches=2)
    trainer = FakeTrainer()
    plan = TrainPlan(8, algorithm, checkpoint_interval=0)
    rows = _run(plan, trainer, max_staleness=max_staleness).rows
    assert [len(part) for part in trainer.trained] == [4] * 8
    assert (trainer.step, trainer.pushed) == (8, [4, 8])
    assert [row["step"] for row in rows] == [4, 8]
    assert [row["trainer/loss"] for row in rows] == [2.5, 6.5]
    assert [row["trainer/grad_norm"] for row in rows] == [2.5, 6.5]
    assert [row["trainer/target_tokens"] for row in rows] == [48, 48]
    assert rows[0]["policy_version"] == 0
    assert [row["weights/versions_held"] for row in rows] == [1, 2]
    assert rows[1]["policy_version"] == (4 if max_staleness == 0 else 0)
    assert rows[1]["staleness/max"] == (0 if max_staleness == 0 else 4)
    assert rows[1]["staleness/limit"] == 4 * max_staleness


def test_every_epoch_deals_every_sequence_once_in_a_new_order() -> None:
    sequences = [TrainSequence([i, i], [0, 1]) for i in range(8)]
    parts = list(deal_minibatches(sequences, epochs=3, minibatches=2, seed="0/0"))
    assert [len(part) for part in parts] == [4] * 6
    epochs = [[s.token_ids[0] for part in parts[i : i + 2] for s in part] for i in (0, 2, 4)]
    assert all(Counter(epoch) == Counter(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = list(deal_minibatches(sequences, epochs=3, minibatches=2, seed="0/0"))
    assert again == parts != list(deal_minibatches(sequences, epochs=3, minibatches=2, seed="0/1"))
    assert list(deal_minibatches(sequences, epochs=1, minibatches=1, seed="x")) == [sequences]
    uneven = [len(p) for p in deal_minibatches(sequences[:7], epochs=1, minibatches=3, seed="x")]
    assert uneven == [2, 2, 3]


def test_checkpoints_are_due_when_an_interval_has_passed() -> None:
    """Three updates per batch and an interval of four: after 6, 9 and 12 updates."""
    algorithm = AlgorithmConfig(group_size=2, groups_per_step=1, epochs=3)
    trainer = FakeTrainer()
    _run(TrainPlan(12, algorithm, checkpoint_interval=4, async_checkpoints=True), trainer)
    assert trainer.saved == [(6, False), (9, False), (12, False)]
    assert trainer.waited == 1


@pytest.mark.parametrize(("interval", "saved"), [(0, [5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_the_last_step_is_always_saved_once(interval: int, saved: list[int]) -> None:
    """A run without an interval ended with its weights gone."""
    algorithm = AlgorithmConfig(group_size=2, groups_per_step=1)
    trainer = FakeTrainer()
    _run(TrainPlan(5, algorithm, checkpoint_interval=interval), trainer)
    assert trainer.saved == [(step, True) for step in saved]


def test_skipped_updates_push_nothing_and_save_nothing() -> None:
    algorithm = AlgorithmConfig(group_size=2, groups_per_step=1)
    trainer = FakeTrainer(skips=[2, 3])
    rows = _run(TrainPlan(4, algorithm, checkpoint_interval=1), trainer).rows
    assert trainer.pushed == [1, 2]
    assert trainer.saved == [(1, True), (2, True)]
    assert [row["step"] for row in rows] == [1, 1, 1, 2]


def test_a_reference_gives_its_logprobs() -> None:
    algorithm = AlgorithmConfig(group_size=2, groups_per_step=1)
    trainer = FakeTrainer()
    (row,) = _run(TrainPlan(1, algorithm, checkpoint_interval=0), trainer, FakeTrainer()).rows
    assert same_numbers([s.ref_logprobs for s in trainer.trained[0]], [[-0.5] * 5] * 2)
    assert row["time/reference_s"] >= 0


def test_a_batch_is_recomputed_once_before_its_first_update() -> None:
    """All epochs and minibatches see the log-probs of the weights that the batch began with."""

    class Drifting(FakeTrainer):
        async def forward(self, sequences: Sequence[TrainSequence]) -> ForwardResult:
            return ForwardResult([np.full(len(s), -self.step, np.float32) for s in sequences])

    algorithm = AlgorithmConfig(
        group_size=2, groups_per_step=2, epochs=2, minibatches=2, recompute_logprobs=True
    )
    trainer = Drifting()
    rows = _run(TrainPlan(8, algorithm, checkpoint_interval=0), trainer).rows
    seen = [
        {float(x) for s in part for x in np.asarray(s.old_logprobs)} for part in trainer.trained
    ]
    assert seen == [{0.0}] * 4 + [{-4.0}] * 4
    assert all(row["time/recompute_s"] >= 0 for row in rows)


def test_a_gap_above_the_bound_stops_before_the_weights_are_pushed() -> None:
    class Apart(FakeTrainer):
        async def train_step(self, *args: Any, **kwargs: Any) -> TrainStepResult:
            result = await super().train_step(*args, **kwargs)
            gap = 0.5 if self.step == 2 else 0.01
            result.forward_backward.metrics.update(
                {
                    "rollout/logprob_gap": Mean(gap, 1.0),
                    "rollout/logprob_gap_max": Max(gap),
                    "rollout/logprob_gap_p99": Quantile((1.0,)),
                    "rollout/effective_sample_size": SampleSize(1.0, 1.0, 1.0),
                }
            )
            return result

    algorithm = AlgorithmConfig(
        group_size=2, groups_per_step=1, max_logprob_gap=0.1, on_logprob_gap="stop"
    )
    trainer = Apart()
    with pytest.raises(MismatchError, match="0.5 nats apart .*step 2"):
        _run(TrainPlan(4, algorithm, checkpoint_interval=0), trainer)
    assert trainer.pushed == [1]


def test_a_push_that_fails_ends_training_with_its_cause() -> None:
    trainer = FakeTrainer()
    trainer.push_error = WeightsError("no room")
    with pytest.raises(WeightsError, match="no room"):
        _run(TrainPlan(4, AlgorithmConfig(group_size=2, groups_per_step=1), 0), trainer)
    assert trainer.pushed == [1]


def test_training_goes_on_while_weights_travel() -> None:
    """One batch ahead, the second is trained on before the first weights have arrived."""
    events: list[str] = []

    class Slow(FakeTrainer):
        async def train_step(self, *args: Any, **kwargs: Any) -> TrainStepResult:
            events.append(f"train {self.step}")
            return await super().train_step(*args, **kwargs)

        async def wait_for_push(self) -> None:
            while len(self.trained) < 2:
                await asyncio.sleep(0)
            events.append(f"published {self.pushed[-1]}")

    algorithm = AlgorithmConfig(group_size=2, groups_per_step=1)
    rows = _run(TrainPlan(3, algorithm, 0), Slow(), max_staleness=1).rows
    assert events[:3] == ["train 0", "train 1", "published 1"]
    assert [row["step"] for row in rows] == [1, 2, 3]


def test_held_out_prompts_are_asked_at_the_start_when_due_and_at_the_end() -> None:
    """Two updates per batch: after 4, and after the last, which is no multiple of four."""
    algorithm = AlgorithmConfig(group_size=2, groups_per_step=1, epochs=2)
    config = EvalConfig(every=4, completions=2, greedy=False, pass_at=[1, 2])
    rows = _run(TrainPlan(6, algorithm, 0), FakeTrainer(), eval=config)
    assert [row["step"] for row in rows.evaluations] == [0, 4, 6]
    assert [row["eval/version_max"] for row in rows.evaluations] == [0, 4, 6]
    first = rows.evaluations[0]
    assert (first["eval/reward"], first["eval/prompts"], first["eval/failed_prompts"]) == (
        0.5,
        3,
        0,
    )
    assert (first["eval/pass@1"], first["eval/pass@2"]) == (0.5, 1.0)
    assert [row["step"] for row in rows.rows] == [2, 4, 6]
