"""Requests from callers to a backend and their completions back, a step at a time.

No weights here: who changes them asks for a moment between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from forge_trainer.errors import DataError, EngineError, ForgeTrainerError
from forge_trainer.types import Completion, GenerationRequest

from .backend import Backend
from .turns import Turns

REFILL = 8
"""Slots are refilled when one in so many is free: a prompt costs a pass of its own."""

Answer = asyncio.Future[Completion]


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Of a turn on the backend's thread."""

    ended: Sequence[tuple[str, Completion]]
    refused: Sequence[tuple[str, Exception]]


class Serving:
    """Takes requests, waits for free slots, answers each as soon as it has ended.

    One task steps the backend while there is anything to do. Stopped by `close`.
    """

    def __init__(self, backend: Backend, turns: Turns, *, num_slots: int) -> None:
        self._backend = backend
        self._turns = turns
        self._num_slots = num_slots
        self._waiting: dict[str, tuple[GenerationRequest, Answer]] = {}
        self._running: dict[str, Answer] = {}
        self._withdrawn: list[str] = []
        """Of running ones, which the backend does not know yet."""
        self._nothing_runs = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None
        self._is_paused = self._is_draining = self._is_closed = False
        self.num_completions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def begin(self, request: GenerationRequest) -> Answer:
        """A completion that is on its way; cancelling it takes the request back.

        Raises:
            DataError: it cannot be answered.
            EngineError: this is closed.
        """
        if self._is_closed:
            raise EngineError("the generator is closed")
        if request.id in self._waiting or request.id in self._running:
            raise DataError(f"request {request.id!r} is on its way already; give another id")
        self._backend.check(request)
        answer: Answer = asyncio.get_running_loop().create_future()
        answer.add_done_callback(functools.partial(self._withdraw_cancelled, request.id))
        self._waiting[request.id] = (request, answer)
        self._go_on()
        return answer

    def _withdraw_cancelled(self, request_id: str, answer: Answer) -> None:
        if not answer.cancelled():
            return
        if self._waiting.pop(request_id, None) is None and request_id in self._running:
            self._withdraw([request_id])
        self._go_on()

    def _withdraw(self, request_ids: Sequence[str]) -> None:
        """Running ones, whose slots are free at the next turn."""
        self._withdrawn += request_ids
        for request_id in request_ids:
            del self._running[request_id]
        if not self._running:
            self._nothing_runs.set()

    def fail(self, error: Callable[[], Exception]) -> None:
        """Answer all that run or wait with an error."""
        waiting, self._waiting = self._waiting, {}
        self._fail_running(error)
        for _, answer in waiting.values():
            _set_error(answer, error())

    def _fail_running(self, error: Callable[[], Exception]) -> None:
        failed = dict(self._running)
        self._withdraw(list(failed))
        for answer in failed.values():
            _set_error(answer, error())
        self._go_on()

    async def pause(self) -> None:
        """No step from now on; returns once none runs."""
        self._is_paused = True
        async with self._turns.turn:
            pass

    def resume(self) -> None:
        """Step again."""
        self._is_paused = False
        self._go_on()

    @contextlib.asynccontextmanager
    async def between_steps(self, *, drained: bool) -> AsyncIterator[None]:
        """A moment between two steps; if `drained`, one when nothing runs, and what waits waits."""
        self._is_draining = drained
        try:
            while drained and self._running:
                self._nothing_runs.clear()
                # Also where it is paused: what runs can end in no other way.
                self._go_on()
                await self._nothing_runs.wait()
            async with self._turns.turn:
                yield
        finally:
            self._is_draining = False
            self._go_on()

    async def close(self) -> None:
        """Answer all that is open with an error, and stop."""
        self._is_closed = True
        num_open = len(self._waiting) + len(self._running)
        self.fail(lambda: EngineError(f"the generator was closed while {num_open} requests ran"))
        if self._stepping is not None:
            await self._stepping

    def _go_on(self) -> None:
        """See to it that somebody does what is to be done."""
        if self._has_work() and (self._stepping is None or self._stepping.done()):
            self._stepping = asyncio.create_task(self._step_while_there_is_work(), name="generate")

    def _has_work(self) -> bool:
        return bool(self._withdrawn or (self._running and self._may_step) or self._may_admit)

    @property
    def _may_step(self) -> bool:
        return self._is_draining or not self._is_paused

    @property
    def _may_admit(self) -> bool:
        return bool(self._waiting) and not (self._is_draining or self._is_paused)

    async def _step_while_there_is_work(self) -> None:
        """Takes from those who wait, gives to the futures of callers; ends when all have theirs."""
        while self._has_work():
            async with self._turns.turn:
                # What there was to do may be gone since.
                if self._has_work():
                    await self._turn()

    async def _turn(self) -> None:
        withdrawn, self._withdrawn = self._withdrawn, []
        admitted = self._admit() if self._may_admit else []
        step = bool(self._running) and self._may_step
        work = functools.partial(self._work, withdrawn, admitted, step=step)
        try:
            outcome = await self._turns.run("generate" if step else "cancel", work)
        except Exception as error:
            self._fail_running(functools.partial(_told, error))
            return
        for request_id, refusal in outcome.refused:
            self._end(request_id, _told(refusal))
        for request_id, completion in outcome.ended:
            self._end(request_id, completion)

    def _admit(self) -> list[GenerationRequest]:
        """Of those that wait, in their order; they count as running from now on."""
        free = self._num_slots - len(self._running)
        if free < min(len(self._waiting), max(self._num_slots // REFILL, 1)):
            return []
        admitted = [request for request, _ in list(self._waiting.values())[:free]]
        for request in admitted:
            self._running[request.id] = self._waiting.pop(request.id)[1]
        return admitted

    def _work(
        self, withdrawn: Sequence[str], admitted: Sequence[GenerationRequest], *, step: bool
    ) -> _Outcome:
        """On the backend's thread."""
        refused: list[tuple[str, Exception]] = []
        for request_id in withdrawn:
            self._backend.cancel(request_id)
        for request in admitted:
            try:
                self._backend.add(request)
            except Exception as error:
                refused.append((request.id, error))
        return _Outcome(self._backend.step() if step else [], refused)

    def _end(self, request_id: str, outcome: Completion | Exception) -> None:
        """Nobody may wait for it any more."""
        answer = self._running.pop(request_id, None)
        if not self._running:
            self._nothing_runs.set()
        if answer is None or answer.done():
            return
        if isinstance(outcome, Completion):
            self.num_completions += 1
            answer.set_result(outcome)
        else:
            answer.set_exception(outcome)


def _set_error(answer: Answer, error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _told(error: Exception) -> Exception:
    """An error of its own for every caller, since each adds its traceback."""
    told: Exception = EngineError(f"generator: {type(error).__name__}: {error}", phase="generate")
    if isinstance(error, ForgeTrainerError):
        told = copy.copy(error)
    told.__cause__ = error
    return told
