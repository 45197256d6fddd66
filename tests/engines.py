"""An engine that is not ours, as a user would bring one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from forge_trainer.config.trainer import TrainerConfig
from forge_trainer.engine.local import LocalEngine
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
