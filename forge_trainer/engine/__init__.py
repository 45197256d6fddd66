"""Engines: what one rank does. Everything here keeps the `Engine` protocol."""

from __future__ import annotations

from pathlib import Path

from forge_trainer.config.trainer import TrainerConfig
from forge_trainer.protocols import Engine
from forge_trainer.types import World


def make_engine(config: TrainerConfig, model_dir: Path, world: World) -> Engine:
    """The engine that the config names; heavy libraries are imported only for the chosen one."""
    if config.engine == "local":
        from .local import LocalEngine

        return LocalEngine(config, model_dir)
    from .titan.engine import TitanEngine

    return TitanEngine(config, model_dir, world)
