"""The handle of a generator over Monarch."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from torch import Tensor

from forge_trainer.actors.generator import GeneratorActor
from forge_trainer.errors import DataError, EngineError, WorkerLostError
from forge_trainer.pieces import StoreAddress, WeightChecksums, WeightsRef, WeightsVersion
from forge_trainer.status import GeneratorStatus
from forge_trainer.types import Completion, GenerationRequest, SamplingParams

from .handles import CLOSE_TIMEOUT_S, translated


class GeneratorHandle:
    """Keeps the `Generator` protocol over one generator actor.

    A message per request would cost more than sampling it, so those of one turn of the event loop
    leave together, and completions come back as many at a time as have ended.
    """

    def __init__(self, actor: GeneratorActor, *, host: str | None = None) -> None:
        """`host` is its name in messages, None where there is one."""
        self._actor: Any = actor
        self._host = host
        self._mail = _Mail(self._submit, self._collect)

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

    async def generate_one(self, request: GenerationRequest) -> Completion:
        """See `ModelGenerator`; WorkerLostError if its process is gone."""
        return await self._mail.answer(request)

    async def pause(self) -> None:
        """Sample nothing until `resume`; see `ModelGenerator`."""
        await self._call(lambda: self._actor.pause.call_one(), "pause")

    async def resume(self) -> None:
        await self._call(lambda: self._actor.resume.call_one(), "resume")

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
        """What is open is answered with an error."""
        try:
            await asyncio.wait_for(
                self._call(lambda: self._actor.close.call_one(), "close"), CLOSE_TIMEOUT_S
            )
        finally:
            await self._mail.close()

    async def _submit(
        self, requests: Sequence[GenerationRequest], withdrawn: Sequence[str]
    ) -> None:
        message = pickle.dumps(requests, protocol=5)
        await self._call(lambda: self._actor.submit.call_one(message, withdrawn), "generate")

    async def _collect(self) -> Sequence[tuple[str, Completion | Exception]]:
        ended: Sequence[tuple[str, Completion | Exception]] = pickle.loads(
            await self._call(lambda: self._actor.collect.call_one(), "generate")
        )
        return ended

    async def _call(self, send: Callable[[], Awaitable[Any]], phase: str) -> Any:
        try:
            return await translated(send(), 0, phase, mesh="generator")
        except WorkerLostError as error:
            error.host = self._host
            raise


Submit = Callable[[Sequence[GenerationRequest], Sequence[str]], Awaitable[None]]
Collect = Callable[[], Awaitable[Sequence[tuple[str, Completion | Exception]]]]


class _Mail:
    """Takes requests from callers, sends them off together, gives each its answer.

    One task collects answers while anything is open. Stopped by `close`, or by a lost process,
    which is told to everybody who waits.
    """

    def __init__(self, submit: Submit, collect: Collect) -> None:
        """Each sends a message: requests, and ids of those taken back; and for what has ended."""
        self._submit, self._collect = submit, collect
        self._open: dict[str, asyncio.Future[Completion]] = {}
        self._outgoing: dict[str, GenerationRequest] = {}
        self._withdrawn: list[str] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._collecting: asyncio.Task[None] | None = None

    async def answer(self, request: GenerationRequest) -> Completion:
        """Its completion; a caller that is cancelled takes the request back."""
        if request.id in self._open:
            raise DataError(f"request {request.id!r} is on its way already; give another id")
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._open[request.id] = answer
        self._flush_soon()
        self._outgoing[request.id] = request
        try:
            return await answer
        except asyncio.CancelledError:
            self._withdraw(request.id)
            raise

    def _withdraw(self, request_id: str) -> None:
        if self._open.pop(request_id, None) is None:
            return
        if self._outgoing.pop(request_id, None) is None:
            self._flush_soon()
            self._withdrawn.append(request_id)

    def _flush_soon(self) -> None:
        """After whoever else has something to send in this turn of the loop."""
        if not self._outgoing and not self._withdrawn:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        requests, self._outgoing = self._outgoing, {}
        withdrawn, self._withdrawn = self._withdrawn, []
        sending = asyncio.create_task(self._send(requests, withdrawn), name="submit")
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _send(self, requests: dict[str, GenerationRequest], withdrawn: Sequence[str]) -> None:
        if requests:
            # It starts once this task waits, so that its message comes after this one.
            self._collect_soon()
        try:
            await self._submit(list(requests.values()), withdrawn)
        except Exception as error:
            self._fail(list(requests), error)

    def _collect_soon(self) -> None:
        if self._collecting is None or self._collecting.done():
            self._collecting = asyncio.create_task(self._collect_all(), name="collect")

    async def _collect_all(self) -> None:
        try:
            while self._open:
                for request_id, outcome in await self._collect():
                    self._end(request_id, outcome)
        except Exception as error:
            self._fail(list(self._open), error)

    def _fail(self, request_ids: Sequence[str], error: Exception) -> None:
        for request_id in request_ids:
            told = copy.copy(error)
            told.__cause__ = error
            self._end(request_id, told)

    def _end(self, request_id: str, outcome: Completion | Exception) -> None:
        answer = self._open.pop(request_id, None)
        if answer is None or answer.done():
            return
        if isinstance(outcome, Completion):
            answer.set_result(outcome)
        else:
            answer.set_exception(outcome)

    async def close(self) -> None:
        """Answers that have come are given, all else is answered with an error."""
        tasks = [*self._sending, *([self._collecting] if self._collecting else [])]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*tasks), CLOSE_TIMEOUT_S)
        self._fail(list(self._open), EngineError("the generator was closed"))
