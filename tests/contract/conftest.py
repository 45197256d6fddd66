"""The same claims for every way to get a trainer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_trainer.config import (
    GeneratorConfig,
    OptimizerConfig,
    PackingConfig,
    TrainerConfig,
    WeightsConfig,
)
from forge_trainer.controller.in_process import start_in_process_trainer
from forge_trainer.pieces import WeightsRef
from forge_trainer.processes.lifecycle import running_services
from forge_trainer.protocols import Trainer, WeightStore
from forge_trainer.weights.memory import MemoryWeightStore
from forge_trainer.weights.stores import open_store
from tests.weights import read_all

INITIAL = "initial"
CONFIG = TrainerConfig(
    device="cpu",
    # eps=1e-5 keeps Adam from blowing rounding noise in tiny gradients up to a full step.
    optimizer=OptimizerConfig(lr=3e-3, eps=1e-5, max_grad_norm=1.0),
    packing=PackingConfig(max_row_tokens=48, rows_per_microbatch=2),
)
KINDS = {
    "local": CONFIG.model_copy(update={"engine": "local"}),
    "titan": CONFIG,
    "actor": CONFIG,
    "actors2": CONFIG.model_copy(update={"num_ranks": 2}),
}


@dataclass
class Subject:
    """A trainer, the store it publishes to, and the loop both live on."""

    trainer: Trainer
    store: WeightStore
    runner: asyncio.Runner

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    def pushed(self) -> tuple[WeightsRef, dict[str, Tensor]]:
        """Publish, and read what was published."""
        ref: WeightsRef = self.run(self.trainer.push_weights())
        return ref, self.run(read_all(self.store, ref.version))[1]

    def reset(self) -> None:
        self.run(self.trainer.clear_gradients())
        self.run(self.trainer.load(name=INITIAL))


@contextlib.asynccontextmanager
async def _started(
    kind: str, model_dir: Path, folder: Path
) -> AsyncIterator[tuple[Trainer, WeightStore]]:
    if kind.startswith("actor"):
        async with running_services(
            KINDS[kind],
            GeneratorConfig(device="cpu", max_prompt_tokens=16),
            WeightsConfig(),
            model_dir=model_dir,
            checkpoint_folder=folder,
        ) as services:
            yield services.trainer, open_store(services.store.address, WeightsConfig())
        return
    store = MemoryWeightStore()
    trainer = await start_in_process_trainer(
        KINDS[kind], model_dir=model_dir, checkpoint_folder=folder, store=store
    )
    yield trainer, store
    await trainer.close()


@pytest.fixture(scope="module", params=KINDS)
def started(
    request: pytest.FixtureRequest, tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    threads = torch.get_num_threads()
    with asyncio.Runner() as runner:
        running = _started(request.param, tiny_qwen3, tmp_path_factory.mktemp(request.param))
        trainer, store = runner.run(running.__aenter__())
        subject = Subject(trainer, store, runner)
        subject.run(trainer.save(INITIAL))
        yield subject
        runner.run(running.__aexit__(None, None, None))
    torch.set_num_threads(threads)


@pytest.fixture
def subject(started: Subject) -> Subject:
    """The trainer as it was at the start."""
    started.reset()
    return started
