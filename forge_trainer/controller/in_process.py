"""A trainer without actors: the same handle over one worker in this process.

For notebooks, tests and quick tries. Imports no Monarch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_trainer.config import TrainerConfig, WeightsConfig
from forge_trainer.protocols import WeightStore
from forge_trainer.types import World
from forge_trainer.weights.memory import MemoryWeightStore
from forge_trainer.worker import Worker

from .checks import check_trainer
from .ranks import TrainerSetup
from .trainer import TrainerHandle


class InProcessRanks:
    """Keeps `RankCalls` over a single worker."""

    size = 1
    is_lost = False

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def call(self, method: str, args_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        (args,) = args_by_rank
        return [await getattr(self._worker, method)(*args)]

    async def ask(self, rank: int, method: str, *args: Any) -> Any:
        return await getattr(self._worker, method)(*args)

    async def close(self) -> None:
        await self._worker.close()


async def start_in_process_trainer(
    config: TrainerConfig,
    *,
    model_dir: Path,
    checkpoint_folder: Path,
    weights: WeightsConfig | None = None,
    store: WeightStore | None = None,
) -> TrainerHandle:
    """A trainer of one rank in this process, ready for calls.

    Raises:
        ValueError: the config asks for more than one rank.
        ConfigError: the config does not fit the model.
    """
    if config.num_ranks != 1:
        raise ValueError(f"in-process trainers have one rank, got num_ranks={config.num_ranks}")
    check_trainer(model_dir, config)
    weights = weights or WeightsConfig()
    worker = Worker(
        config,
        weights,
        model_dir=model_dir,
        world=World(),
    )
    store = store or MemoryWeightStore(weights.verify)
    worker.use_store(store)
    setup = TrainerSetup(config, weights, model_dir, checkpoint_folder, store)
    handle = TrainerHandle(setup, InProcessRanks(worker))
    await handle.setup()
    return handle
