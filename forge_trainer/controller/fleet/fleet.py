"""GeneratorFleet: several generators that keep the protocol of one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from forge_trainer.errors import EngineError, WorkerLostError
from forge_trainer.pieces import WeightChecksums, WeightsRef, WeightsVersion
from forge_trainer.protocols import Generator
from forge_trainer.status import GeneratorStatus
from forge_trainer.tasks import first_error
from forge_trainer.types import Completion, GenerationRequest, SamplingParams

from .members import Members
from .pulls import Pulls
from .replica import Replica
from .sending import Call, Sender
from .status import fleet_status
from .watch import HangWatch, statuses_of

T = TypeVar("T")

STATUS_TIMEOUT_S = 5.0


class GeneratorFleet:
    """Keeps the `Generator` protocol over some of them, which are called replicas here.

    A request goes to the replica with the least to do, or to the one that has had its group. If
    that is lost or fails, another one is asked, once; what the first still answers is dropped. A
    request that is at fault itself (DataError) is not sent again.
    """

    def __init__(
        self, generators: Mapping[str, Generator], *, slots: int, request_timeout_s: float
    ) -> None:
        """`slots` are the completions that each samples at one time.

        Args:
            generators: by name, such as generator/1.
            slots: see GeneratorConfig.batch_size.
            request_timeout_s: see GeneratorConfig.
        """
        self._members = Members(generators)
        self._sender = Sender(self._members, slots)
        self._pulls = Pulls(self._members)
        self._watch = HangWatch(self._members, limit_s=request_timeout_s)
        self._watching: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def replicas(self) -> dict[str, Generator]:
        """Those that are left, by name."""
        return {replica.name: replica.generator for replica in self._members.living}

    async def generate_one(self, request: GenerationRequest) -> Completion:
        """The completion of one prompt. A caller that is cancelled takes its request back.

        Raises:
            DataError: the prompt is empty or too long, or its completion would not fit.
            EngineError, WeightsError: a second replica failed, too, or there is no other.
            WorkerLostError: the second was lost, too, or none is left.
        """
        self._begin_to_watch()
        tokens = len(request.token_ids) + request.sampling.max_completion_tokens
        return await self._sender.send(
            lambda generator: generator.generate_one(request), tokens=tokens, group=request.group
        )

    async def generate(
        self, prompts: Sequence[str], sampling: SamplingParams
    ) -> list[list[Completion]]:
        """`sampling.num_completions` completions for every prompt, spread over the replicas.

        Raises as `generate_one`.
        """
        self._begin_to_watch()
        parts = _equal_parts(prompts, len(await self._members.wait_for_serving()))
        each = sampling.num_completions * sampling.max_completion_tokens
        async with first_error() as group:
            tasks = [
                group.create_task(self._generate(part, sampling, tokens=len(part) * each))
                for part in parts
            ]
        return [completions_G for task in tasks for completions_G in task.result()]

    async def _generate(
        self, prompts: Sequence[str], sampling: SamplingParams, *, tokens: int
    ) -> list[list[Completion]]:
        return await self._sender.send(
            lambda generator: generator.generate(prompts, sampling), tokens=tokens
        )

    async def pull_weights(self, ref: WeightsRef | WeightsVersion | None = None) -> WeightsVersion:
        """Load a version in all replicas side by side, the newest by default.

        Returns once one has it and the others had as long again. From then on, nothing is asked of
        a replica that does not have it; it goes on trying. Requests that run are not touched.

        Raises:
            ForgeTrainerError: no replica got it, and the first one's error says why.
        """
        self._begin_to_watch()
        return await self._pulls.pull(ref)

    async def pause(self) -> None:
        """Sample nothing until `resume`; returns once no replica takes a step."""
        await self._ask_all(_pause)

    async def resume(self) -> None:
        await self._ask_all(_resume)

    async def weight_checksums(self) -> WeightChecksums:
        """Of the first replica that serves; `replicas` are asked one by one for theirs."""
        return await self._ask_first(lambda generator: generator.weight_checksums())

    async def read_weight(self, name: str) -> Tensor:
        """Of the first replica that serves, as above."""
        return await self._ask_first(lambda generator: generator.read_weight(name))

    async def _ask_first(self, call: Call[T]) -> T:
        while True:
            first, *_ = await self._members.wait_for_serving()
            try:
                return await self._sender.ask(first, call)
            except WorkerLostError:
                # Taken out by now; the next one is asked.
                continue

    async def _ask_all(self, change: Callable[[Replica], Awaitable[None]]) -> None:
        """Side by side; replicas that turn out to be lost are taken out."""
        living = self._members.require_living()
        answers = await asyncio.gather(*map(change, living), return_exceptions=True)
        for replica, answer in zip(living, answers, strict=True):
            if isinstance(answer, WorkerLostError):
                self._members.take_out(replica, answer)
            elif isinstance(answer, BaseException):
                raise answer
        self._members.require_living()

    async def get_status(self) -> GeneratorStatus:
        """Of all: sums, the weights that are promised, and every replica.

        One that does not answer holds up the others for a moment.

        Raises:
            WorkerLostError: none is left.
        """
        living = self._members.require_living()
        statuses = await statuses_of(self._members, living, timeout_s=STATUS_TIMEOUT_S)
        self._members.require_living()
        return fleet_status(self._members, statuses)

    async def close(self) -> None:
        """Close those that are left, side by side."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pulls.stop()
        if self._watching is not None:
            self._watching.cancel()
        closing = (replica.generator.close() for replica in self._members.living)
        for answer in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer

    def _begin_to_watch(self) -> None:
        if self._is_closed:
            raise EngineError("the generators are closed")
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch.run(), name="watch of generators")
        elif self._watching.done():
            # It ends with an error only.
            self._watching.result()


async def _pause(replica: Replica) -> None:
    await replica.ask(replica.generator.pause())
    replica.is_paused = True


async def _resume(replica: Replica) -> None:
    await replica.ask(replica.generator.resume())
    replica.is_paused = False


def _equal_parts(prompts: Sequence[str], number: int) -> list[Sequence[str]]:
    """At most so many, in order, that differ by one prompt at most.

    5 prompts in 2 parts -> 3 and 2
    """
    bounds = [-(-len(prompts) * part // number) for part in range(number + 1)]
    return [prompts[a:b] for a, b in itertools.pairwise(bounds) if a < b]
