"""One generator of a fleet: what it was asked, what it runs on, and whether it is still asked."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from forge_trainer.errors import (
    EngineError,
    ForgeTrainerError,
    TornWeightsError,
    WeightsError,
    WorkerLostError,
)
from forge_trainer.pieces import WeightsVersion
from forge_trainer.protocols import Generator

T = TypeVar("T")

HOPELESS_PULLS = 3
"""Pulls that fail in a row, after which nobody waits for the next one."""


class Replica:
    """Owns the calls to its generator: once it is taken out, none of them is waited for."""

    def __init__(self, name: str, generator: Generator) -> None:
        """`name` is for messages, such as generator/1."""
        self.name = name
        self.generator = generator
        self.version = WeightsVersion(epoch=0, policy_version=0)
        """Of the weights that it is known to run on."""
        self.is_torn = False
        """A pull failed half way: it answers nothing until another one succeeds."""
        self.pull_error: ForgeTrainerError | None = None
        """Of the last pull, if it failed."""
        self.num_failed_pulls = 0
        """Since the last one that succeeded."""
        self.num_pulling = 0
        """Pulls that run."""
        self.catching_up: asyncio.Task[None] | None = None
        """Pulls what others have, and has not got it yet."""
        self.is_paused = False
        self.lost: WorkerLostError | None = None
        """Why it was taken out; None while it is in."""
        self.load = 0
        """Tokens that its open requests may cost."""
        self.num_sent = 0
        self.num_answered = 0
        self.errors_in_a_row = 0
        """Steps that failed since it completed anything."""
        self._open: set[_Call[Any]] = set()
        self._num_errors = 0

    @property
    def num_open(self) -> int:
        """Calls that it has not answered."""
        return len(self._open)

    @property
    def may_catch_up(self) -> bool:
        """True while it is worth while to wait for its next weights."""
        return self.num_pulling > 0 or (
            self.catching_up is not None and self.num_failed_pulls < HOPELESS_PULLS
        )

    async def ask(self, work: Coroutine[Any, Any, T], *, tokens: int = 0) -> T:
        """The result of `work`, a call to its generator. Whoever is cancelled takes the call back.

        Raises:
            WorkerLostError: the replica was taken out. What the generator answers later is dropped.
        """
        if self.lost is not None:
            work.close()
            raise self.lost
        call = _Call(work, self.name, self._num_errors)
        self._open.add(call)
        self.load += tokens
        self.num_sent += 1
        try:
            result = await call.answer
        except EngineError:
            self._note_error(call)
            raise
        finally:
            self._open.discard(call)
            self.load -= tokens
            call.task.cancel()
        self.num_answered += 1
        if tokens:
            self.errors_in_a_row = 0
        return result

    def _note_error(self, call: _Call[Any]) -> None:
        """A step that fails answers many calls with one error: it counts once."""
        if call.errors_before == self._num_errors:
            self._num_errors += 1
            self.errors_in_a_row += 1

    def note_pull(self, version: WeightsVersion) -> None:
        """It runs on this version now."""
        self.version = version
        self.is_torn, self.pull_error, self.num_failed_pulls = False, None, 0

    def note_failed_pull(self, error: ForgeTrainerError) -> None:
        self.pull_error = error
        self.num_failed_pulls += 1
        if isinstance(error, TornWeightsError):
            self.note_torn(error)

    def note_torn(self, error: WeightsError) -> None:
        """It says so itself."""
        self.is_torn, self.pull_error = True, error

    def take_out(self, error: WorkerLostError) -> int:
        """Answer all open calls with `error`, and ask it nothing more; how many there were."""
        self.lost = error
        for call in self._open:
            call.give_up(error)
        return len(self._open)


class _Call(Generic[T]):
    """A call on its way. Its answer is the generator's, or comes from us once that is given up."""

    def __init__(self, work: Coroutine[Any, Any, T], name: str, errors_before: int) -> None:
        self.answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(work, name=f"call to {name}")
        self.errors_before = errors_before
        """Of the replica, when it was asked."""
        self._name = name
        self.task.add_done_callback(self._hand_over)

    def _hand_over(self, task: asyncio.Task[T]) -> None:
        error: BaseException | None
        if task.cancelled():
            error = EngineError(f"{self._name} dropped a call; was it closed?")
        else:
            # Looked at also if nobody waits any more, or asyncio would log it.
            error = task.exception()
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(task.result())
        else:
            self.answer.set_exception(error)

    def give_up(self, error: WorkerLostError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
        # Perhaps it hears of it. It is not waited for: a generator that hangs hears nothing.
        self.task.cancel()
