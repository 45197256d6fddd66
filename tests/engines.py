"""Engines that are not ours, as a user would bring them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from forge_trainer.config import TrainerConfig
from forge_trainer.engine.local import LocalEngine
from forge_trainer.engine.titan.engine import TitanEngine
from forge_trainer.pieces import WeightPiece
from forge_trainer.status import EngineFacts
from forge_trainer.types import World


class TaggedEngine:
    """LocalEngine, but for what it says of itself."""

    def __init__(self, config: TrainerConfig, model_dir: Path, world: World) -> None:
        self._inner = LocalEngine(config, model_dir, world)

    def facts(self) -> EngineFacts:
        return dataclasses.replace(self._inner.facts(), model_type="tagged")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class FaultyEngine:
    """LocalEngine, but for one element of one tensor that it publishes."""

    DAMAGED = "model.layers.1.mlp.up_proj.weight"

    def __init__(self, config: TrainerConfig, model_dir: Path, world: World) -> None:
        self._inner = LocalEngine(config, model_dir, world)

    def weight_pieces(self, *, dtype: torch.dtype) -> Iterator[WeightPiece]:
        for piece in self._inner.weight_pieces(dtype=dtype):
            if piece.name == self.DAMAGED:
                data = piece.data.clone()
                data[0, 0] += 0.5
                yield dataclasses.replace(piece, data=data)
            else:
                yield piece

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class SlowToPublish(TitanEngine):
    """Once there is a file `slow` beside the model, its last rank does not come past one piece."""

    def weight_pieces(self, *, dtype: torch.dtype) -> Iterator[WeightPiece]:
        for index, piece in enumerate(super().weight_pieces(dtype=dtype)):
            is_stuck = index == 1 and self._world.rank == self._world.size - 1
            if is_stuck and (self._model_dir / "slow").exists():
                (self._model_dir / "reached").touch()
                threading.Event().wait()
            yield piece
