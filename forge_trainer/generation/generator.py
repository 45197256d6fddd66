"""A generator: a model that completes prompts, and the weights it does that with."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from torch import Tensor

from forge_trainer.errors import TornWeightsError, WeightsError
from forge_trainer.functional.pieces.manifests import num_bytes_of
from forge_trainer.pieces import TensorFacts, WeightChecksums, WeightsRef, WeightsVersion
from forge_trainer.protocols import WeightStore
from forge_trainer.status import GeneratorStatus, TransferStatus
from forge_trainer.tasks import to_the_end
from forge_trainer.types import Completion, SamplingParams

T = TypeVar("T")


class CompletingModel(Protocol):
    """What samples. All methods run on one thread."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What it runs on, to be filled in place; a tied tensor under one of its names."""
        ...

    def load(self) -> None: ...

    def complete(
        self, prompts: Sequence[str], sampling: SamplingParams, *, policy_version: int
    ) -> list[list[Completion]]: ...

    def checksums(self) -> dict[str, TensorFacts]: ...

    def read_weight(self, name: str) -> Tensor: ...


class ModelGenerator:
    """Keeps the `Generator` protocol over a model. Call `use_store` and `setup` first.

    Generating, reading weights and copying pulled ones into the model take turns. A pull fetches
    and verifies beside them, so that a call waits for the copy alone; what is asked for meanwhile
    is answered by the old weights, as after a pull that failed. Every completion says by which.
    """

    def __init__(self, model: CompletingModel) -> None:
        self._model = model
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generator")
        self._turn = asyncio.Lock()
        self._one_pull = asyncio.Lock()
        self._phase = "starting"
        self._version = WeightsVersion(epoch=0, policy_version=0)
        self._pull: TransferStatus | None = None
        self._store: WeightStore | None = None
        self._torn: str | None = None
        self._num_completions = 0

    async def setup(self) -> None:
        """Load the model; the directory's weights are policy version 0."""
        await self._run("setup", self._model.load)

    async def generate(
        self, prompts: Sequence[str], sampling: SamplingParams
    ) -> list[list[Completion]]:
        """`sampling.num_completions` completions for every prompt.

        Raises:
            DataError: a prompt is empty or too long, or its completion would not fit.
            WeightsError: the last pull failed half way.
        """

        def complete() -> list[list[Completion]]:
            version = self._version.policy_version
            return self._model.complete(prompts, sampling, policy_version=version)

        async with self._turn:
            self._require_whole()
            groups = await self._run("generate", complete)
        self._num_completions += sum(len(group) for group in groups)
        return groups

    def _require_whole(self) -> None:
        if self._torn is not None:
            raise WeightsError(self._torn)

    def use_store(self, store: WeightStore) -> None:
        """Pull from this store from now on."""
        self._store = store

    async def pull_weights(self, ref: WeightsRef | WeightsVersion | None = None) -> WeightsVersion:
        """Load a published version in place, after all of it has arrived and been checked.

        Without a version, the newest one. One pull at a time.

        Raises:
            WeightsError: older than the one in use, missing, or not whole; the old weights stay.
            TornWeightsError: copying failed half way; generating is refused until a pull succeeds.
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
            async with reading.arrived(self._model.tensors) as arrived, self._turn:
                try:
                    await arrived.load()
                except TornWeightsError as error:
                    self._torn = str(error)
                    raise
                self._version, self._torn = version, None
            self._pull = TransferStatus(num_bytes_of(reading.manifest), time.perf_counter() - start)
        return version

    def _require_not_older(self, version: WeightsVersion) -> None:
        if version < self._version:
            raise WeightsError(f"weights {version} are older than {self._version}, in use")

    async def weight_checksums(self) -> WeightChecksums:
        """The version in use, and a checksum of every tensor.

        Raises:
            WeightsError: the last pull failed half way.
        """
        async with self._turn:
            self._require_whole()
            tensors = await self._run("weight_checksums", self._model.checksums)
            return WeightChecksums(self._version, tensors)

    async def read_weight(self, name: str) -> Tensor:
        """A copy on the CPU of a tensor in use, by any of its names.

        Raises:
            WeightsError: there is no such tensor, or the last pull failed half way.
        """
        async with self._turn:
            self._require_whole()
            return await self._run("read_weight", lambda: self._model.read_weight(name))

    async def get_status(self) -> GeneratorStatus:
        return GeneratorStatus(
            version=self._version,
            pull=self._pull,
            phase=self._phase,
            num_completions=self._num_completions,
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    async def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._store is not None:
            self._store.close()

    async def _run(self, phase: str, work: Callable[[], T]) -> T:
        self._phase = phase
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._phase = "idle"
