"""What the loops add to the longer of generating and training, on a synthetic load.

Generator and trainer only wait, as long as they are told to; all between them is what a run uses:
episodes, slots, both loops. So the numbers are those of the controller, on one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from apps.bench.measure import Row, Spread, StepRows
from apps.grpo.parts import sampler
from forge_trainer.config import AlgorithmConfig, EnvironmentConfig, TinyModelConfig
from forge_trainer.environments import EpisodeRunner, make_episode_runner
from forge_trainer.functional.rewards import exact_match
from forge_trainer.hf import create_tiny_model
from forge_trainer.metrics import Mean
from forge_trainer.pieces import WeightsRef, WeightsVersion
from forge_trainer.replay import Replay
from forge_trainer.reporting import Reporter
from forge_trainer.run.pipeline import Pipeline
from forge_trainer.run.rollout import run_rollout
from forge_trainer.run.training import Models, TrainPlan, Watchers, run_training
from forge_trainer.status import TrainerStatus
from forge_trainer.tasks import run_with_background
from forge_trainer.types import (
    Completion,
    ForwardBackwardResult,
    GenerationRequest,
    OptimStepResult,
    Prompt,
    SamplingParams,
    TrainStepResult,
)

P, G, SLOTS, STEPS, WARMUP, ROUNDS = 8, 8, 16, 10, 3, 3
STEP_S = 0.5
SYNC_S = 0.005
"""Of a push, and of a pull."""


@dataclass
class WaitingGenerator:
    """Answers so many requests at one time, each after the same while."""

    service_s: float
    version: int = 0
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SLOTS))

    async def generate_one(self, request: GenerationRequest) -> Completion:
        async with self.slots:
            version = self.version
            await asyncio.sleep(self.service_s)
        return Completion(
            prompt_token_ids=request.token_ids,
            token_ids=np.full(8, 65, np.int32),
            logprobs=np.full(8, -1.0, np.float32),
            policy_versions=np.full(8, version, np.int32),
            text="A" if request.seed % 2 else "B",
            temperature=1.0,
            stop_reason="stop",
        )

    async def pull_weights(self, ref: WeightsRef) -> None:
        await asyncio.sleep(SYNC_S)
        self.version = ref.version.policy_version


@dataclass
class WaitingTrainer:
    """Takes the same while for every step."""

    train_s: float
    step: int = 0

    async def train_step(self, sequences: Sequence[Any], **_: Any) -> TrainStepResult:
        await asyncio.sleep(self.train_s)
        self.step += 1
        count = len(sequences)
        return TrainStepResult(
            ForwardBackwardResult({"loss/mean": Mean(0.0, 1.0)}, 8 * count, count),
            OptimStepResult(self.step, 1.0, 0.1, skipped=False, metrics={}),
        )

    async def push_weights(self, *, wait: bool) -> WeightsRef:
        return WeightsRef(WeightsVersion(0, self.step), 1, 4, "float32", "memory")

    async def wait_for_push(self) -> None:
        await asyncio.sleep(SYNC_S)

    async def get_status(self) -> TrainerStatus:
        v = WeightsVersion(0, self.step)
        return TrainerStatus(self.step, "idle", 0.0, 0, 0, v, [v], None, False, 0, None, None)

    async def save(self) -> None: ...

    async def wait_for_save(self) -> None: ...


async def run() -> list[Row]:
    """Every load in turn, so many times."""
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = create_tiny_model(Path(scratch) / "model", TinyModelConfig(), seed=0)
        runner = make_episode_runner(
            EnvironmentConfig(),
            exact_match,
            model_dir=model_dir,
            sampling=SamplingParams(8),
            max_prompt_tokens=16,
            seed=0,
        )
        results: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            for name, value in (await _round(runner)).items():
                results.setdefault(name, []).append(value)
        await runner.close()
    meanings: dict[str, tuple[str, float | None]] = {
        "step_over_max": ("S = 1, balanced: step / max(generating, training)", 1.10),
        "two_ahead_over_max": ("the same with S = 2", None),
        "in_turn_over_max": ("the same with S = 0: they take turns, so 2 and more", None),
        "wait_share": ("S = 1, training takes 1.5 x as long: waiting / step", 0.05),
        "controller_ms_per_episode": ("CPU time of the controller, milliseconds", None),
    }
    return [
        Row(key, meaning, Spread.of(results[key]), bar=bar)
        for key, (meaning, bar) in meanings.items()
    ]


async def _round(runner: EpisodeRunner) -> dict[str, float]:
    balanced = [await _steps(runner, S, train_s=STEP_S) for S in (1, 2, 0)]
    slow = await _steps(runner, 1, train_s=1.5 * STEP_S)
    before = time.process_time()
    await _steps(runner, 1, train_s=0.0, generate_s=0.0)
    cpu_s = time.process_time() - before
    return {
        "step_over_max": _median(balanced[0], "time/step_s") / STEP_S,
        "two_ahead_over_max": _median(balanced[1], "time/step_s") / STEP_S,
        "in_turn_over_max": _median(balanced[2], "time/step_s") / STEP_S,
        "wait_share": _median(slow, "time/wait_rollout_s") / _median(slow, "time/step_s"),
        "controller_ms_per_episode": cpu_s / (STEPS * P * G) * 1000,
    }


def _median(rows: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.median(row[key] for row in rows[WARMUP:])


async def _steps(
    runner: EpisodeRunner, max_staleness: int, *, train_s: float, generate_s: float = STEP_S
) -> list[Mapping[str, float]]:
    """The rows of a run in which all completions of a batch take `generate_s` together."""
    rows = StepRows()
    generator: Any = WaitingGenerator(generate_s / (P * G / SLOTS))
    trainer: Any = WaitingTrainer(train_s)
    pipeline = Pipeline(Replay(groups_per_step=P, max_staleness=max_staleness))
    plan = TrainPlan(STEPS, AlgorithmConfig(group_size=G, groups_per_step=P), 0)
    prompts = (Prompt(f"{number}:", "A") for number in itertools.count())
    rollout = run_rollout(prompts, sampler(runner, generator, G), pipeline)
    training = run_training(Models(trainer, generator), pipeline, Watchers(Reporter([rows])), plan)
    await run_with_background(training, rollout)
    return rows.rows
