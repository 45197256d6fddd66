"""What a controller sees of a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from forge_trainer.pieces import (
    WeightsRef,
)
from forge_trainer.status import TrainerFacts, TrainerStatus
from forge_trainer.types import (
    CheckpointFormat,
    CheckpointInfo,
    ForwardBackwardResult,
    ForwardResult,
    LossFn,
    Normalize,
    OptimParams,
    OptimStepResult,
    TrainSequence,
    TrainStepResult,
)


class Trainer(Protocol):
    """What a controller sees of a trainer: no ranks, no packing, no data-parallel size."""

    async def forward(
        self, sequences: Sequence[TrainSequence], *, with_entropy: bool = False
    ) -> ForwardResult: ...

    async def forward_backward(
        self,
        sequences: Sequence[TrainSequence],
        *,
        loss: str | LossFn,
        loss_config: Mapping[str, Any] | None = None,
        return_logprobs: bool = False,
    ) -> ForwardBackwardResult: ...

    async def optim_step(
        self, *, normalize: Normalize = "tokens", params: OptimParams | None = None
    ) -> OptimStepResult: ...

    async def train_step(
        self,
        sequences: Sequence[TrainSequence],
        *,
        loss: str | LossFn,
        loss_config: Mapping[str, Any] | None = None,
        normalize: Normalize = "tokens",
        params: OptimParams | None = None,
        return_logprobs: bool = False,
    ) -> TrainStepResult: ...

    async def clear_gradients(self) -> None: ...

    async def save(
        self,
        name: str | None = None,
        *,
        path: str | None = None,
        weights_only: bool = False,
        format: CheckpointFormat = "dcp",
        wait: bool = True,
    ) -> CheckpointInfo: ...

    async def wait_for_save(self) -> CheckpointInfo | None: ...

    async def load(
        self,
        *,
        path: str | None = None,
        name: str | None = None,
        step: int | None = None,
        weights_only: bool = False,
    ) -> CheckpointInfo: ...

    async def to(self, device: str) -> None: ...

    async def train_mode(self) -> None: ...

    async def eval_mode(self) -> None: ...

    async def push_weights(
        self, *, policy_version: int | None = None, wait: bool = True
    ) -> WeightsRef: ...

    async def wait_for_push(self) -> WeightsRef | None: ...

    async def get_config(self) -> TrainerFacts: ...

    async def get_status(self) -> TrainerStatus: ...

    async def close(self) -> None: ...
