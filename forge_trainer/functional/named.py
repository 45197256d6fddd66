"""Things of a user's that a config names by where they are."""

from __future__ import annotations

import pkgutil
from typing import Any

from forge_trainer.errors import ConfigError


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
