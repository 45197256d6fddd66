"""A trainer and a generator in this process, over a store in memory; for both engines."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from forge_trainer.config import (
    GeneratorConfig,
    OptimizerConfig,
    PackingConfig,
    TrainerConfig,
    WeightsConfig,
)
from forge_trainer.controller.in_process import start_in_process_trainer
from forge_trainer.controller.trainer import TrainerHandle
from forge_trainer.generation import ModelGenerator, make_generator
from forge_trainer.weights.memory import MemoryWeightStore
from tests.data import random_sequences

GOOD = random_sequences(4)
CONFIG = TrainerConfig(
    device="cpu",
    optimizer=OptimizerConfig(lr=1e-2),
    packing=PackingConfig(max_row_tokens=64, rows_per_microbatch=2),
)


@dataclasses.dataclass
class Bench:
    """A trainer and a generator that share a store."""

    trainer: TrainerHandle
    generator: ModelGenerator
    store: MemoryWeightStore
    runner: asyncio.Runner

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)


@pytest.fixture(params=["titan", "local"])
def bench(request: pytest.FixtureRequest, tiny_qwen3: Path, tmp_path: Path) -> Iterator[Bench]:
    store = MemoryWeightStore()
    with asyncio.Runner() as runner:
        trainer = runner.run(
            start_in_process_trainer(
                CONFIG.model_copy(update={"engine": request.param}),
                model_dir=tiny_qwen3,
                checkpoint_folder=tmp_path / "checkpoints",
                weights=WeightsConfig(keep_versions=2),
                store=store,
            )
        )
        generator = make_generator(
            GeneratorConfig(device="cpu", max_prompt_tokens=8),
            WeightsConfig(),
            model_dir=tiny_qwen3,
        )
        generator.use_store(store)
        runner.run(generator.setup())
        yield Bench(trainer, generator, store, runner)
        runner.run(generator.close())
        runner.run(trainer.close())
    assert not dist.is_initialized()
