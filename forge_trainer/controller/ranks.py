"""What a handle is given: what to know of its trainer, and how to reach its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from forge_trainer.config import TrainerConfig, WeightsConfig
from forge_trainer.errors import EngineError
from forge_trainer.protocols import WeightStore

T = TypeVar("T")

OpenStore = Callable[[], Coroutine[Any, Any, WeightStore]]
"""Opens a new store in all processes of a run; the controller's view of it."""


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """What a handle is told when it is made."""

    trainer: TrainerConfig
    weights: WeightsConfig
    model_dir: Path
    checkpoint_folder: Path
    store: WeightStore
    """Where the ranks publish, as the controller reaches it."""


class RankCalls(Protocol):
    """Reaches the ranks of one trainer."""

    @property
    def size(self) -> int: ...

    @property
    def is_lost(self) -> bool:
        """True once a rank is gone; no call can succeed any more."""
        ...

    async def call(self, method: str, args_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        """One ordered call on every rank; the results by rank.

        Raises:
            ForgeTrainerError: the cause, once every rank has answered or is given up.
        """
        ...

    async def ask(self, rank: int, method: str, *args: Any) -> Any:
        """A call on one rank that needs no order and no collective."""
        ...

    async def close(self) -> None: ...


async def ask_all(ranks: RankCalls, method: str, *args: Any) -> list[Any]:
    """What every rank answers to a call that needs no order and no collective, by rank."""
    asks = (ranks.ask(rank, method, *args) for rank in range(ranks.size))
    return list(await asyncio.gather(*asks))


def agreed(method: str, results: Sequence[T]) -> T:
    """The result that all ranks gave.

    Raises:
        EngineError: they differ, so their states do.
    """
    # By text, since a nan is equal to nothing, itself included.
    if len({repr(result) for result in results}) > 1:
        raise EngineError(
            f"ranks disagree on the result of {method}: {list(results)}", phase=method
        )
    return results[0]
