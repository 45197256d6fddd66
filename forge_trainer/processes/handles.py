"""Handles over Monarch: the only file that calls endpoints.

It turns what Monarch raises into the project's errors: the error a worker raised, or
WorkerLostError with the rank whose process died.
"""

from __future__ import annotations

import asyncio
import pickle
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import (
    SupervisionError as MonarchSupervisionError,
)
from monarch.actor import ActorError
from torch import Tensor

from forge_trainer.actors.generator import GeneratorActor
from forge_trainer.actors.trainer import TitanTrainer
from forge_trainer.config import TrainerConfig
from forge_trainer.controller.ranks import ask_all
from forge_trainer.errors import (
    CollectiveError,
    DataError,
    EngineError,
    ForgeTrainerError,
    WorkerLostError,
)
from forge_trainer.pieces import StoreAddress, WeightChecksums, WeightsRef, WeightsVersion
from forge_trainer.status import GeneratorStatus
from forge_trainer.types import CallTicket, Completion, SamplingParams

CLOSE_TIMEOUT_S = 20.0
FILE_CALLS = ("setup", "save", "load", "stage_weights")
"""Calls in which ranks read or write different amounts, and may be that far apart."""


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
        self._config = config
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
        sent = self._send(method, args_by_rank)
        tasks = [
            asyncio.create_task(
                _translated(future, rank, method, host=self._hosts[rank]), name=f"{method}[{rank}]"
            )
            for rank, future in enumerate(sent)
        ]
        try:
            return await self._all_or_first_cause(tasks, method)
        except WorkerLostError as error:
            self._lost = error
            raise
        finally:
            for task in tasks:
                task.cancel()

    def _send(self, method: str, args_by_rank: Sequence[Sequence[Any]]) -> list[Awaitable[Any]]:
        """All messages leave before anything is awaited, so that no rank waits for another's.

        Raises:
            DataError: the arguments cannot be pickled. No rank has got them.
        """
        ticket = CallTicket(self._handle_id, self._number)
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

    async def _all_or_first_cause(self, tasks: list[asyncio.Task[Any]], method: str) -> list[Any]:
        """All results, or the error that explains the others.

        Waits without limit for the first answer, since nobody knows how long a step takes. From
        then on the others get as long as ranks may be apart; if a collective has broken, that time
        is over already.
        """
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        timeout_s = self._most_apart_s(method)
        if pending and not any(task.exception() for task in done):
            done, pending = await asyncio.wait(
                tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION
            )
        if pending and (failed := [task.exception() for task in done if task.exception()]):
            if method == "setup" or any(isinstance(error, WorkerLostError) for error in failed):
                # Nothing comes of this call any more; the others may explain it, or wait in vain.
                timeout_s = self._config.grace_s
            _, pending = await asyncio.wait(tasks, timeout=timeout_s)
        errors = [e for task in tasks if task.done() and (e := task.exception()) is not None]
        explains = [error for error in errors if not isinstance(error, CollectiveError)]
        if pending and (method == "setup" or any(isinstance(e, WorkerLostError) for e in explains)):
            # Who is silent waits for the one that failed.
            raise _cause(explains or errors)
        if pending:
            silent = next(rank for rank, task in enumerate(tasks) if task in pending)
            cause = f"; first error of the others: {errors[0]}" if errors else ""
            raise WorkerLostError(
                f"a rank did not answer within {timeout_s:.0f} s after another did{cause}",
                rank=silent,
                phase=method,
            )
        if errors:
            raise _cause(errors)
        return [task.result() for task in tasks]

    def _most_apart_s(self, method: str) -> float:
        if method in FILE_CALLS:
            return self._config.checkpoint_timeout_s
        return self._config.collective_timeout_s

    async def can_reach(self, token: str) -> bool:
        """True if all ranks see that file."""
        return all(await ask_all(self, "can_reach", token))

    async def open_store(self, address: StoreAddress) -> None:
        """Publish through this store from now on."""
        await ask_all(self, "open_store", address)

    async def ask(self, rank: int, method: str, *args: Any) -> Any:
        return await _translated(getattr(self._ranks[rank], method).call_one(*args), rank, method)

    async def close(self) -> None:
        if self._lost is None:
            await asyncio.wait_for(self.call("close", [()] * self.size), CLOSE_TIMEOUT_S)


def _cause(errors: Sequence[BaseException]) -> BaseException:
    """A dead process explains broken collectives; a rank's own error explains those, too."""

    def how_far_from_the_cause(error: BaseException) -> int:
        if isinstance(error, CollectiveError):
            return 2
        return 0 if isinstance(error, WorkerLostError) else 1

    first = min(errors, key=how_far_from_the_cause)
    if any(isinstance(error, CollectiveError) for error in errors) and not isinstance(
        first, WorkerLostError
    ):
        # The others lost a collective because of it, so the mesh cannot be used any more.
        rank, phase = getattr(first, "rank", None), getattr(first, "phase", None)
        step = getattr(first, "step", None)
        return WorkerLostError(f"the mesh is lost: {first}", rank=rank, phase=phase, step=step)
    return first


class GeneratorHandle:
    """Keeps the `Generator` protocol over one generator actor."""

    def __init__(self, actor: GeneratorActor) -> None:
        self._actor: Any = actor

    async def can_reach(self, token: str) -> bool:
        """True if its process sees that file."""
        return bool(await self._call(lambda: self._actor.can_reach.call_one(token), "can_reach"))

    async def open_store(self, address: StoreAddress) -> None:
        """Pull from this store from now on."""
        await self._call(lambda: self._actor.open_store.call_one(address), "open_store")

    async def setup(self) -> None:
        """Load the model."""
        await self._call(lambda: self._actor.setup.call_one(), "setup")

    async def generate(
        self, prompts: Sequence[str], sampling: SamplingParams
    ) -> list[list[Completion]]:
        completions: list[list[Completion]] = pickle.loads(
            await self._call(lambda: self._actor.generate.call_one(prompts, sampling), "generate")
        )
        return completions

    async def pull_weights(self, ref: WeightsRef | WeightsVersion | None = None) -> WeightsVersion:
        """Load a version in place, the newest by default; see `ModelGenerator`."""
        version: WeightsVersion = await self._call(
            lambda: self._actor.pull_weights.call_one(ref), "pull_weights"
        )
        return version

    async def weight_checksums(self) -> WeightChecksums:
        """The version in use, and a checksum of every tensor."""
        checksums: WeightChecksums = await self._call(
            lambda: self._actor.weight_checksums.call_one(), "weight_checksums"
        )
        return checksums

    async def read_weight(self, name: str) -> Tensor:
        """A copy on the CPU of a tensor in use; WeightsError if there is no such name."""
        tensor: Tensor = await self._call(
            lambda: self._actor.read_weight.call_one(name), "read_weight"
        )
        return tensor

    async def get_status(self) -> GeneratorStatus:
        status: GeneratorStatus = await self._call(
            lambda: self._actor.status.call_one(), "get_status"
        )
        return status

    async def close(self) -> None:
        await asyncio.wait_for(
            self._call(lambda: self._actor.close.call_one(), "close"), CLOSE_TIMEOUT_S
        )

    async def _call(self, send: Callable[[], Awaitable[Any]], phase: str) -> Any:
        return await _translated(send(), 0, phase, mesh="generator")


async def _translated(
    future: Awaitable[Any],
    rank: int,
    phase: str,
    *,
    mesh: str = "trainer",
    host: str | None = None,
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
        where = "" if host is None else f" on host {host}"
        raise WorkerLostError(
            f"a {mesh} process{where} is gone: {reason}", rank=rank, phase=phase
        ) from error
