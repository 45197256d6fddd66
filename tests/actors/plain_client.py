"""A client of torchstore in a process that has nothing of this project."""

from __future__ import annotations

import sys
from typing import Any

from monarch.actor import Actor, endpoint


def without_the_library() -> None:
    """Runs first in the process: whatever needs the library fails from now on."""
    assert not [name for name in sys.modules if name.startswith("forge_trainer")]
    sys.modules["forge_trainer"] = None  # type: ignore[assignment]


class PlainClient(Actor):
    """Runs what the documents show."""

    @endpoint
    async def run(self, source: str, function: str, *arguments: Any) -> Any:
        """What an async function of `source` returns."""
        names: dict[str, Any] = {"__name__": "example"}
        exec(source, names)
        return await names[function](*arguments)
