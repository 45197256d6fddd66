"""A check that values share."""

from __future__ import annotations

import math
from collections.abc import Callable

from forge_trainer.errors import DataError


def require_number(
    name: str, value: float | None, holds: Callable[[float], bool], wanted: str
) -> None:
    """Raises DataError for a value, if there is one, that is not finite or not as wanted."""
    if value is not None and not (math.isfinite(value) and holds(value)):
        raise DataError(f"{name} is {value}; it must be finite and {wanted}")
