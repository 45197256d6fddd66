"""One set of real processes for all tests of a file that leave it whole: a trainer of two ranks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forge_trainer.config import (
    GeneratorConfig,
    OptimizerConfig,
    PackingConfig,
    TrainerConfig,
    WeightsConfig,
)
from forge_trainer.controller.trainer import TrainerHandle
from forge_trainer.processes.generator_handle import GeneratorHandle
from forge_trainer.processes.lifecycle import Services, running_services
from forge_trainer.protocols import WeightStore
from forge_trainer.weights.stores import open_store
from tests.processes import descendants, shared_memory, wait_until_gone
from tests.waiting import A_HANG_S

# eps=1e-2 keeps Adam from blowing rounding noise in tiny gradients up to a full step.
TRAINER = TrainerConfig(
    num_ranks=2,
    device="cpu",
    optimizer=OptimizerConfig(lr=1e-2, eps=1e-2, weight_decay=0.1),
    packing=PackingConfig(max_row_tokens=48, rows_per_microbatch=2),
    collective_timeout_s=A_HANG_S,
)
GENERATOR = GeneratorConfig(device="cpu", max_prompt_tokens=16)
INITIAL = "initial"


@dataclass(frozen=True)
class Cluster:
    """Running services and the loop they live on."""

    trainer: TrainerHandle
    generator: GeneratorHandle
    services: Services
    store: WeightStore
    model_dir: Path
    runner: asyncio.Runner

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)


@contextlib.contextmanager
def running_cluster(
    model_dir: Path,
    folder: Path,
    trainer: TrainerConfig = TRAINER,
    weights: WeightsConfig | None = None,
) -> Iterator[Cluster]:
    """Services on a loop of their own; afterwards none of their processes and no shared memory."""
    weights = weights or WeightsConfig()
    before, segments = descendants(), shared_memory()
    processes: set[int] = set()
    with asyncio.Runner() as runner:
        services = running_services(
            trainer,
            GENERATOR,
            weights,
            model_dir=model_dir,
            checkpoint_folder=folder,
        )
        started = runner.run(services.__aenter__())
        processes |= descendants() - before
        try:
            store = open_store(started.store.address, weights)
            yield Cluster(started.trainer, started.generator, started, store, model_dir, runner)
        finally:
            runner.run(services.__aexit__(None, None, None))
    # Others may have been started meanwhile, such as Python's own tracker of resources.
    assert not wait_until_gone(processes)
    assert shared_memory() <= segments


@pytest.fixture(scope="session")
def shared_cluster(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tiny_qwen3, tmp_path_factory.mktemp("checkpoints")) as cluster:
        cluster.run(cluster.trainer.save(INITIAL))
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    """The shared processes, with the trainer as it was at the start."""
    shared_cluster.run(shared_cluster.trainer.clear_gradients())
    shared_cluster.run(shared_cluster.trainer.load(name=INITIAL))
    return shared_cluster
