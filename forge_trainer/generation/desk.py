"""Requests of callers elsewhere: they hand in many at a time, and fetch whatever has ended."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from forge_trainer.errors import ForgeTrainerError
from forge_trainer.types import Completion, GenerationRequest

Outcome = Completion | ForgeTrainerError
Answer = asyncio.Future[Completion]


class RequestDesk:
    """Between calls that take a message each and futures that end one by one."""

    def __init__(self, begin: Callable[[GenerationRequest], Answer]) -> None:
        """`begin` gives the future of a completion, which may be cancelled."""
        self._begin = begin
        self._open: dict[str, Answer] = {}
        self._ended: list[tuple[str, Outcome]] = []
        self._changed = asyncio.Event()

    def submit(self, requests: Sequence[GenerationRequest], withdrawn: Sequence[str] = ()) -> None:
        """Begin `requests`; one that is refused has ended with its error. Of those `withdrawn`,
        nothing more is heard unless they have ended already."""
        for request_id in withdrawn:
            if (answer := self._open.get(request_id)) is not None:
                answer.cancel()
        for request in requests:
            try:
                answer = self._begin(request)
            except ForgeTrainerError as error:
                self._note(request.id, error)
            else:
                self._open[request.id] = answer
                answer.add_done_callback(functools.partial(self._end, request.id))

    async def collect(self) -> list[tuple[str, Outcome]]:
        """What has ended since it was asked last; waits for the first as long as any is open."""
        while self._open and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        ended, self._ended = self._ended, []
        return ended

    def _end(self, request_id: str, answer: Answer) -> None:
        del self._open[request_id]
        if answer.cancelled():
            self._changed.set()
            return
        error = answer.exception()
        if error is None:
            self._note(request_id, answer.result())
        else:
            assert isinstance(error, ForgeTrainerError)
            self._note(request_id, error)

    def _note(self, request_id: str, outcome: Outcome) -> None:
        self._ended.append((request_id, outcome))
        self._changed.set()
