"""The handle of a trainer's ranks over Monarch: it and that of generators alone call endpoints.

What Monarch raises is turned into the project's errors: the error a worker raised, or
WorkerLostError with the rank whose process died.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Sequence
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import (
    SupervisionError as MonarchSupervisionError,
)
from monarch.actor import ActorError

from forge_trainer.actors.trainer import TitanTrainer
from forge_trainer.config import TrainerConfig
from forge_trainer.controller.ranks import ask_all
from forge_trainer.errors import (
    DataError,
    EngineError,
    ForgeTrainerError,
    WorkerLostError,
)
from forge_trainer.pieces import StoreAddress
from forge_trainer.status import RankStatus
from forge_trainer.types import CallTicket

from .answers import Answers
from .patience import CallLimits
from .stalls import StallWatch

CLOSE_TIMEOUT_S = 20.0


class MeshRanks:
    """Keeps `RankCalls` over a mesh of TitanTrainer actors."""

    def __init__(
        self,
        actors: Sequence[TitanTrainer],
        config: TrainerConfig,
        *,
        hosts: Sequence[str | None] = (),
    ) -> None:
        """One actor per rank; `hosts` are their names in messages, None where there is one."""
        self._limits = CallLimits(config)
        self._ranks: list[Any] = list(actors)
        self._hosts = hosts or [None] * len(actors)
        self._handle_id = uuid.uuid4().hex[:8]
        self._number = 0
        self._lost: WorkerLostError | None = None

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    async def call(self, method: str, args_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        if self._lost is not None:
            raise self._lost
        patience = self._limits.of(method, args_by_rank[0])
        sent = self._send(method, args_by_rank, patience.collective_s)
        waiting = [translated(future, rank, method) for rank, future in enumerate(sent)]
        watch = StallWatch(method, num_ranks=self.size, ask=self._status, limit_s=patience.stall_s)
        answers = Answers(method, patience, abort=self._abort, stalled=watch.stalled)
        try:
            results = await answers.all_of(waiting)
        except WorkerLostError as error:
            if error.rank is not None:
                error.host = self._hosts[error.rank]
            self._lost = error
            raise
        self._limits.note(method, args_by_rank[0], results)
        return results

    def _send(
        self, method: str, args_by_rank: Sequence[Sequence[Any]], collective_s: float
    ) -> list[Awaitable[Any]]:
        """All messages leave before anything is awaited, so that no rank waits for another's.

        Raises:
            DataError: the arguments cannot be pickled. No rank has got them.
        """
        ticket = CallTicket(self._handle_id, self._number, collective_s)
        sent: list[Awaitable[Any]] = []
        for rank, args in zip(self._ranks, args_by_rank, strict=True):
            try:
                sent.append(getattr(rank, method).call_one(ticket, *args))
            except Exception as error:
                if sent:
                    self._lost = WorkerLostError(
                        f"the mesh is lost: only some ranks got a call: {error}", phase=method
                    )
                    raise self._lost from error
                raise DataError(
                    f"{method}: an argument cannot be sent to another process: {error}; a loss "
                    "must be a function that pickles, without locks, files or handles in it"
                ) from error
        self._number += 1
        return sent

    async def _abort(self, rank: int) -> None:
        await self.ask(rank, "abort")

    async def _status(self, rank: int) -> RankStatus:
        status: RankStatus = await self.ask(rank, "status")
        return status

    async def can_reach(self, token: str) -> bool:
        """True if all ranks see that file."""
        return all(await ask_all(self, "can_reach", token))

    async def open_store(self, address: StoreAddress) -> None:
        """Publish through this store from now on."""
        await ask_all(self, "open_store", address)

    async def ask(self, rank: int, method: str, *args: Any) -> Any:
        return await translated(getattr(self._ranks[rank], method).call_one(*args), rank, method)

    async def close(self) -> None:
        if self._lost is None:
            await asyncio.wait_for(self.call("close", [()] * self.size), CLOSE_TIMEOUT_S)


async def translated(
    future: Awaitable[Any],
    rank: int,
    phase: str,
    *,
    mesh: str = "trainer",
) -> Any:
    """The result of an endpoint, or the project's error for what Monarch raised."""
    try:
        return await future
    except ActorError as error:
        cause = error.exception
        if isinstance(cause, ForgeTrainerError):
            raise cause from error
        raise EngineError(
            f"{mesh}: {type(cause).__name__}: {cause}", rank=rank, phase=phase
        ) from error
    except MonarchSupervisionError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise WorkerLostError(
            f"a {mesh} process is gone: {reason}", rank=rank, phase=phase
        ) from error
