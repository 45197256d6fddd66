"""Engines: what one rank does. Everything here keeps the `Engine` protocol."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from forge_trainer.config import TrainerConfig
from forge_trainer.errors import ConfigError
from forge_trainer.functional.named import import_callable
from forge_trainer.protocols import Engine
from forge_trainer.types import World

EngineFactory = Callable[[TrainerConfig, Path, World], Engine]

ENGINES = {
    "titan": "forge_trainer.engine.titan.engine:TitanEngine",
    "local": "forge_trainer.engine.local:LocalEngine",
}
"""Name -> where it is; heavy libraries are imported only for the chosen one."""


def find_engine(name: str) -> EngineFactory:
    """The engine called `name`, or the one that "package.module:name" points at.

    Raises:
        ConfigError: there is none.
    """
    where = ENGINES.get(name, name)
    if ":" not in where:
        raise ConfigError(
            f"trainer.engine: {name!r} is unknown; use one of {sorted(ENGINES)} or "
            "'package.module:Engine'"
        )
    factory: EngineFactory = import_callable("trainer.engine:", where)
    return factory
