"""A generator: a backend that samples, and the weights it does that with."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forge_trainer.config import GeneratorConfig
from forge_trainer.errors import DataError, TornWeightsError, WeightsError
from forge_trainer.functional.pieces.manifests import num_bytes_of
from forge_trainer.pieces import WeightChecksums, WeightsRef, WeightsVersion
from forge_trainer.protocols import ArrivedWeights, WeightStore
from forge_trainer.status import GeneratorStatus, TransferStatus
from forge_trainer.tasks import to_the_end
from forge_trainer.types import Completion, GenerationRequest, SamplingParams

from .backend import Backend
from .serving import Answer, Serving
from .turns import Turns


class ModelGenerator:
    """Keeps the `Generator` protocol over a backend. Call `use_store` and `setup` first.

    Steps, reading weights and taking over pulled ones take turns. A pull fetches and verifies
    beside them; then requests that run are finished with the old weights (`update: drain`), or go
    on with the new ones (`in_flight`). Every token says by which it was sampled.
    """

    def __init__(self, backend: Backend, config: GeneratorConfig) -> None:
        self._backend = backend
        self._config = config
        self._turns = Turns()
        self._serving = Serving(backend, self._turns, num_slots=config.batch_size)
        self._one_pull = asyncio.Lock()
        self._version = WeightsVersion(epoch=0, policy_version=0)
        self._pull: TransferStatus | None = None
        self._store: WeightStore | None = None
        self._torn: str | None = None
        self._num_seeds = 0

    async def setup(self) -> None:
        """Load the model; the directory's weights are policy version 0."""
        await self._turns.run("setup", self._backend.load)
        self._num_seeds = 0

    async def generate(
        self, prompts: Sequence[str], sampling: SamplingParams
    ) -> list[list[Completion]]:
        """`sampling.num_completions` completions for every prompt.

        Their seeds follow from `generator.seed` and from how many there were: the same calls give
        the same completions.

        Raises: like `generate_one`.
        """
        ids = await self._turns.run("encode", lambda: [self._encoded(p) for p in prompts])
        requests = [
            GenerationRequest(token_ids, sampling, seed=self._next_seed())
            for token_ids in ids
            for _ in range(sampling.num_completions)
        ]
        for prompt, request in zip(prompts, requests[:: sampling.num_completions], strict=True):
            self._require_fit(prompt, request)
        answers = [self.begin(request) for request in requests]
        try:
            done = await asyncio.gather(*answers)
        finally:
            # Nobody wants the others of a call that has failed.
            for answer in answers:
                answer.cancel()
        G = sampling.num_completions
        return [done[i * G : (i + 1) * G] for i in range(len(prompts))]

    def _encoded(self, prompt: str) -> NDArray[np.int32]:
        return np.array(self._backend.encode(prompt), np.int32)

    def _next_seed(self) -> int:
        self._num_seeds += 1
        return ((self._config.seed or 0) << 32) + self._num_seeds

    def _require_fit(self, prompt: str, request: GenerationRequest) -> None:
        try:
            self._backend.check(request)
        except DataError as error:
            raise DataError(f"{error}: {prompt[:80]!r}") from error

    async def generate_one(self, request: GenerationRequest) -> Completion:
        """The completion of one prompt; cancelled, its slot is free at once.

        Raises:
            DataError: the prompt is empty or too long, or its completion would not fit.
            WeightsError: the last pull failed half way.
            EngineError: sampling failed, or the generator was closed.
        """
        return await self.begin(request)

    def begin(self, request: GenerationRequest) -> Answer:
        """The future of a completion; cancelling it takes the request back.

        Raises: like `generate_one`.
        """
        self._require_whole()
        return self._serving.begin(request)

    def _require_whole(self) -> None:
        if self._torn is not None:
            raise WeightsError(self._torn)

    async def pause(self) -> None:
        """Sample nothing until `resume`, but for what a pull has to let end first."""
        await self._serving.pause()

    async def resume(self) -> None:
        """Sample again."""
        self._serving.resume()

    def use_store(self, store: WeightStore) -> None:
        """Pull from this store from now on."""
        self._store = store

    async def pull_weights(self, ref: WeightsRef | WeightsVersion | None = None) -> WeightsVersion:
        """Load a published version in place, after all of it has arrived and been checked.

        Without a version, the newest one. One pull at a time.

        Raises:
            WeightsError: older than the one in use, missing, or not whole; the old weights stay.
            TornWeightsError: copying failed half way; what ran has failed, and generating is
                refused until a pull succeeds.
        """
        async with self._one_pull:
            return await to_the_end(self._pull_weights(ref))

    async def _pull_weights(self, ref: WeightsRef | WeightsVersion | None) -> WeightsVersion:
        wanted = ref.version if isinstance(ref, WeightsRef) else ref
        if wanted is not None:
            self._require_not_older(wanted)
        if self._store is None:
            raise WeightsError("this generator has no store to pull from; call use_store first")
        start = time.perf_counter()
        async with self._store.reading(wanted) as reading:
            version = reading.manifest.version
            self._require_not_older(version)
            moment = self._serving.between_steps(drained=self._config.update == "drain")
            async with reading.arrived(self._backend.tensors) as arrived, moment:
                await self._take_over(arrived, version)
            self._pull = TransferStatus(num_bytes_of(reading.manifest), time.perf_counter() - start)
        return version

    async def _take_over(self, arrived: ArrivedWeights, version: WeightsVersion) -> None:
        """Between two steps."""
        keep_cache = self._config.kv_cache == "keep"
        try:
            await arrived.load()
            await self._use(version, keep_cache=keep_cache)
        except TornWeightsError as error:
            torn = self._torn = str(error)
            self._serving.fail(lambda: WeightsError(torn))
            raise
        self._version, self._torn = version, None

    async def _use(self, version: WeightsVersion, *, keep_cache: bool) -> None:
        def use() -> None:
            self._backend.use_weights(version, keep_cache=keep_cache)

        try:
            await self._turns.run("pull_weights", use)
        except Exception as error:
            raise TornWeightsError(
                f"weights {version} were loaded, but not taken over: {type(error).__name__}: "
                f"{error}; pull again before anything is sampled"
            ) from error

    def _require_not_older(self, version: WeightsVersion) -> None:
        if version < self._version:
            raise WeightsError(f"weights {version} are older than {self._version}, in use")

    async def weight_checksums(self) -> WeightChecksums:
        """The version in use, and a checksum of every tensor.

        Raises:
            WeightsError: the last pull failed half way.
        """
        async with self._turns.turn:
            self._require_whole()
            tensors = await self._turns.run("weight_checksums", self._backend.checksums)
            return WeightChecksums(self._version, tensors)

    async def read_weight(self, name: str) -> Tensor:
        """A copy on the CPU of a tensor in use, by any of its names.

        Raises:
            WeightsError: there is no such tensor, or the last pull failed half way.
        """
        async with self._turns.turn:
            self._require_whole()
            return await self._turns.run("read_weight", lambda: self._backend.read_weight(name))

    async def get_status(self) -> GeneratorStatus:
        return GeneratorStatus(
            version=self._version,
            pull=self._pull,
            phase=self._turns.phase,
            num_completions=self._serving.num_completions,
            host=socket.gethostname(),
            pid=os.getpid(),
            num_running=self._serving.num_running,
            num_waiting=self._serving.num_waiting,
        )

    async def close(self) -> None:
        """Fail what is open, and let go of the model and the store."""
        await self._serving.close()
        async with self._turns.turn:
            await self._turns.run("close", self._backend.close)
        self._turns.close()
        if self._store is not None:
            self._store.close()
