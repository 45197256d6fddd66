"""Environments by name, checked before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from forge_trainer.config import EnvironmentConfig
from forge_trainer.errors import ConfigError
from forge_trainer.functional.named import import_callable
from forge_trainer.protocols import Environment

SHIPPED = {
    "single_turn": "forge_trainer.environments.shipped.single_turn:SingleTurn",
    "guess": "forge_trainer.environments.shipped.guess:Guess",
    "calculator": "forge_trainer.environments.shipped.calculator:Calculator",
}
AGENT = "agent"
"""Not an environment but whoever asks for completions by itself, see `serving`."""
VERBS = {"reset": ("task", "seed"), "step": ("message", "stop_reason"), "close": ()}


def environment_maker(config: EnvironmentConfig) -> Callable[[], Environment]:
    """What makes the environment of one episode. One is made here, to see that it can be.

    Raises:
        ConfigError: it cannot be imported, does not take the options, or lacks a verb.
    """
    name = config.name
    if name not in SHIPPED and not name.partition(":")[2]:
        raise ConfigError(
            f"environment.name: {name!r} is unknown; use one of {sorted([*SHIPPED, AGENT])} or "
            "'package.module:name'"
        )
    make = import_callable("environment.name", SHIPPED.get(name, name))
    try:
        inspect.signature(make).bind(**config.options)
    except TypeError as error:
        raise ConfigError(f"environment.options: {name} does not take them: {error}") from None
    except ValueError:
        # It says nothing of its parameters.
        pass
    try:
        made = make(**config.options)
    except Exception as error:
        raise ConfigError(
            f"environment: {name} cannot be made with {config.options}: "
            f"{type(error).__name__}: {error}"
        ) from error
    _require_verbs(name, made)
    return lambda: make(**config.options)


def _require_verbs(name: str, environment: Any) -> None:
    for verb, parameters in VERBS.items():
        method = getattr(environment, verb, None)
        call = f"async def {verb}({', '.join(('self', *parameters))})"
        if not inspect.iscoroutinefunction(method):
            raise ConfigError(f"environment.name: {name} has no `{call}`, which it needs")
        try:
            inspect.signature(method).bind(*parameters)
        except TypeError as error:
            raise ConfigError(
                f"environment.name: {verb} of {name} cannot be called as `{call}`: {error}"
            ) from None
