"""A generator that answers when the test says so."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from forge_trainer.errors import ForgeTrainerError, WorkerLostError
from forge_trainer.pieces import WeightChecksums, WeightsRef, WeightsVersion
from forge_trainer.status import GeneratorStatus
from forge_trainer.types import Completion, GenerationRequest, SamplingParams


def request(name: str, *, tokens: int = 10, group: str = "") -> GenerationRequest:
    """A request that may cost `tokens`, one of them its prompt."""
    sampling = SamplingParams(max_completion_tokens=tokens - 1)
    return GenerationRequest([1], sampling, group=group, id=name)


def completion(text: str, version: int = 0) -> Completion:
    """One token; its text says who answered what."""
    versions = np.array([version], np.int32)
    return Completion([1], [2], [-0.5], versions, text, 1.0, "length")


class FakeGenerator:
    """Keeps the `Generator` protocol. It holds requests until `answer`; it pulls at once, unless
    told otherwise."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = WeightsVersion(0, 0)
        self.newest = WeightsVersion(0, 0)
        self.open: dict[str, asyncio.Future[Completion]] = {}
        """Requests by id; prompts of `generate` joined by commas."""
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.lost: WorkerLostError | None = None
        self.is_deaf = False
        """It neither hears of cancellations nor says what it does."""
        self.pulls: deque[asyncio.Future[None] | ForgeTrainerError] = deque()
        """What the next pulls wait for, or fail with."""
        self.pull_error: ForgeTrainerError | None = None
        """Of every pull."""
        self.pulled: list[WeightsRef | WeightsVersion | None] = []
        self.num_steps = 0
        self.is_paused = self.is_closed = False

    async def generate_one(self, request: GenerationRequest) -> Completion:
        return await self._completion(request.id)

    async def generate(
        self, prompts: Sequence[str], sampling: SamplingParams
    ) -> list[list[Completion]]:
        await self._completion(",".join(prompts))
        G = sampling.num_completions
        return [[completion(f"{self.name}:{prompt}")] * G for prompt in prompts]

    async def _completion(self, name: str) -> Completion:
        self._require_living()
        assert name not in self.open, "it has it already"
        self.asked.append(name)
        future = self.open[name] = asyncio.get_running_loop().create_future()
        while True:
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                if not self.is_deaf:
                    self.cancelled.append(name)
                    raise
            finally:
                if not self.is_deaf:
                    del self.open[name]

    def answer(self, name: str) -> None:
        """Somebody who does not listen any more, gets it, too."""
        self.open[name].set_result(completion(f"{self.name}:{name}", self.version.policy_version))

    def fail(self, name: str, error: ForgeTrainerError) -> None:
        self.open[name].set_exception(error)

    def fail_all(self, error: ForgeTrainerError) -> None:
        """As a step that raises does."""
        for future in self.open.values():
            if not future.done():
                future.set_exception(error)

    def die(self) -> None:
        """Its process is gone."""
        self.lost = WorkerLostError(f"a {self.name} process is gone", rank=0, phase="generate")
        self.fail_all(self.lost)

    def hold_pull(self) -> asyncio.Future[None]:
        """The next pull waits for this."""
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pulls.append(held)
        return held

    async def pull_weights(self, ref: WeightsRef | WeightsVersion | None = None) -> WeightsVersion:
        self._require_living()
        self.pulled.append(ref)
        first = self.pulls.popleft() if self.pulls else self.pull_error
        if isinstance(first, ForgeTrainerError):
            raise first
        if first is not None:
            await first
        self._require_living()
        self.version = ref.version if isinstance(ref, WeightsRef) else ref or self.newest
        return self.version

    async def pause(self) -> None:
        self._require_living()
        self.is_paused = True

    async def resume(self) -> None:
        self._require_living()
        self.is_paused = False

    async def weight_checksums(self) -> WeightChecksums:
        self._require_living()
        return WeightChecksums(self.version, {})

    async def read_weight(self, name: str) -> Tensor:
        self._require_living()
        return Tensor([float(self.name.rpartition("/")[2])])

    async def get_status(self) -> GeneratorStatus:
        self._require_living()
        if self.is_deaf:
            await asyncio.Event().wait()
        return GeneratorStatus(
            version=self.version,
            pull=None,
            phase="generate" if self.open else "idle",
            num_completions=0,
            host="here",
            pid=1,
            num_running=len(self.open),
            num_steps=self.num_steps,
        )

    async def close(self) -> None:
        self._require_living()
        self.is_closed = True

    def _require_living(self) -> None:
        if self.lost is not None:
            raise self.lost
