"""What actors cost: a TitanTrainer's step against the same trainer in this process."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import torch

from apps.bench.measure import Measure, Row, interleaved, ratios
from forge_trainer.config import (
    GeneratorConfig,
    PackingConfig,
    TinyModelConfig,
    TrainerConfig,
    WeightsConfig,
)
from forge_trainer.controller.in_process import start_in_process_trainer
from forge_trainer.hf import create_tiny_model
from forge_trainer.processes.lifecycle import running_services
from forge_trainer.protocols import Trainer
from forge_trainer.types import TrainSequence

ROUNDS = 15
TINY = TinyModelConfig(hidden_size=256, intermediate_size=1024, num_layers=4)
CONFIG = TrainerConfig(device="cpu", packing=PackingConfig(max_row_tokens=64))
TOKENS, SEQUENCES = 64, 7


async def run() -> list[Row]:
    """The ratio of steps of about 200 ms, one rank each, taken in turn."""
    torch.set_num_threads(1)
    async with both_trainers(TINY) as (actor, in_process):
        pairs = await interleaved(_stepping(actor), _stepping(in_process), rounds=ROUNDS)
    in_process_s = sorted(seconds for _, seconds in pairs)[len(pairs) // 2]
    meaning = f"train_step, actor / in-process ({in_process_s * 1000:.0f} ms)"
    return [Row("actor_over_inprocess", meaning, ratios(pairs), bar=1.05)]


@contextlib.asynccontextmanager
async def both_trainers(tiny: TinyModelConfig) -> AsyncIterator[tuple[Trainer, Trainer]]:
    """The same trainer over an actor and in this process."""
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = create_tiny_model(Path(scratch) / "model", tiny, seed=0)
        checkpoints = Path(scratch) / "checkpoints"
        async with running_services(
            CONFIG,
            GeneratorConfig(device="cpu"),
            WeightsConfig(),
            model_dir=model_dir,
            checkpoint_folder=checkpoints,
        ) as services:
            in_process = await start_in_process_trainer(
                CONFIG, model_dir=model_dir, checkpoint_folder=checkpoints
            )
            yield services.trainer, in_process
            await in_process.close()


def _stepping(trainer: Trainer) -> Measure:
    sequences = [
        TrainSequence([1 + i % 200] * TOKENS, [0] + [1] * (TOKENS - 1)) for i in range(SEQUENCES)
    ]

    async def step() -> float:
        start = time.perf_counter()
        await trainer.train_step(sequences, loss="cross_entropy")
        return time.perf_counter() - start

    return step
