"""Things of a user's that a config names by where they are."""

from __future__ import annotations

import inspect
import pkgutil
from typing import Any

from forge_trainer.errors import ConfigError


def is_async(function: Any) -> bool:
    """Whether calling it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  (not whether it can be called)
    )


def import_callable(what: str, where: str) -> Any:
    """The function or class that `where`, "package.module:name", points at.

    Raises:
        ConfigError: there is none, told as one of `what`.
    """
    try:
        found = pkgutil.resolve_name(where)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{what} {where!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"{what} {where!r} is a {type(found).__name__}, not a function")
    return found
