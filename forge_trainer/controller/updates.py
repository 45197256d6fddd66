"""Updates of a trainer, and how many it has made."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import get_args

from forge_trainer.errors import DataError, ForgeTrainerError, WorkerLostError
from forge_trainer.metrics import Sum
from forge_trainer.types import Normalize, OptimParams, OptimStepResult, TrainStepResult

from .batches import BatchDealer, PreparedCall
from .publishing import WeightsPublisher
from .ranks import RankCalls, agreed


class Updates:
    """What a handle's updates do within their turn."""

    def __init__(self, ranks: RankCalls, publisher: WeightsPublisher) -> None:
        self._ranks = ranks
        self._publisher = publisher
        self.step = 0
        """Updates made, in this life or before the checkpoint that was loaded."""

    async def optim_step(self, normalize: Normalize, params: OptimParams | None) -> OptimStepResult:
        """See `TrainerHandle.optim_step`. Waits for a push that reads the live weights."""
        await self._publisher.wait_for_live_weights()
        start = time.perf_counter()
        results: list[OptimStepResult] = await self._ranks.call(
            "optim_step", [(normalize, params)] * self._ranks.size
        )
        result = agreed("optim_step", results)
        self.step = result.step
        seconds = Sum(time.perf_counter() - start)
        return replace(result, metrics={**result.metrics, "time/optim_step_s": seconds})

    async def train_step(
        self,
        batches: BatchDealer,
        call: PreparedCall,
        normalize: Normalize,
        params: OptimParams | None,
    ) -> TrainStepResult:
        """See `TrainerHandle.train_step`."""
        fb = await batches.forward_backward(call)
        try:
            return TrainStepResult(fb, await self.optim_step(normalize, params))
        except WorkerLostError:
            raise
        except ForgeTrainerError:
            await self._ranks.call("clear_gradients", [()] * self._ranks.size)
            raise


def require_normalize(normalize: str) -> None:
    """Raises DataError for what nothing can be divided by."""
    if normalize not in get_args(Normalize):
        raise DataError(f"normalize is {normalize!r}; use one of {get_args(Normalize)}")
