"""An engine that holds nothing but tensors, sharded by FSDP2, to measure how weights travel.

Which set of tensors it publishes is chosen by the learning rate of its last update: 0 the first
set of `tensors.json` in the model's directory, 1 the second, and so on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forge_trainer.config import TrainerConfig
from forge_trainer.pieces import WeightPiece
from forge_trainer.status import EngineFacts, Progress
from forge_trainer.types import (
    EngineForwardBackward,
    LossFn,
    OptimParams,
    OptimStepResult,
    TrainBatch,
    World,
)

SETS_FILE = "tensors.json"
COMPUTE_SIZE, COMPUTE_ROUNDS = 512, 120
"""A forward_backward multiplies matrices of this size so often: about 0.3 s on a core."""


class _Tensors(nn.Module):
    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"t{index}", nn.Parameter(torch.ones(*shape)))


class ShardedTensors:
    """As much of the `Engine` protocol as pushing needs."""

    def __init__(self, config: TrainerConfig, model_dir: Path, world: World) -> None:
        self._model_dir = model_dir
        self._world = world
        self.progress = Progress()
        self.step = 0
        self.accumulated = (0, 0)
        self._chosen = 0

    def setup(self) -> None:
        """Join the other ranks and shard all sets."""
        dist.init_process_group("gloo")
        sets = json.loads((self._model_dir / SETS_FILE).read_text())
        self._modules = [_Tensors(shapes) for shapes in sets]
        for module in self._modules:
            fully_shard(module)
        self._pieces = [list(_pieces(module)) for module in self._modules]

    def facts(self) -> EngineFacts:
        rank = self._world.rank
        return EngineFacts(
            model_type="tensors",
            vocab_size=256,
            max_sequence_tokens=64,
            num_parameters=0,
            dp_rank=rank,
            dp_size=self._world.size,
            coordinates={"dp": rank, "tp": 0, "pp": 0},
            has_outputs=True,
            device="cpu",
        )

    def forward_backward(
        self, batches: Sequence[TrainBatch], loss_fn: LossFn, *, return_logprobs: bool = False
    ) -> EngineForwardBackward:
        """Computes, so that something runs beside a push."""
        matrix = torch.ones(COMPUTE_SIZE, COMPUTE_SIZE)
        for _ in range(COMPUTE_ROUNDS):
            matrix = (matrix @ matrix).clamp(max=1.0)
        return EngineForwardBackward(0.0, 1, 1, {}, [])

    def optim_step(self, *, normalize: str, params: OptimParams | None = None) -> OptimStepResult:
        self._chosen = int(params.lr or 0) if params else self._chosen
        self.step += 1
        with torch.no_grad():
            for piece in self._pieces[self._chosen]:
                piece.data.fill_(float(self.step))
        return OptimStepResult(self.step, 0.0, 0.0)

    def weight_pieces(self, *, dtype: torch.dtype) -> Iterator[WeightPiece]:
        return iter(self._pieces[self._chosen])

    def bound_collectives(self, timeout_s: float) -> None:
        """Nobody hangs here."""

    def abort(self) -> None:
        """Nobody waits for it."""

    def close(self) -> None:
        dist.destroy_process_group()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not part of this benchmark")


def _pieces(module: nn.Module) -> Iterator[WeightPiece]:
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        _, offsets = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        local = parameter.to_local().detach()
        yield WeightPiece(name, tuple(parameter.shape), tuple(offsets), local, torch.float32)
