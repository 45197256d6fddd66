"""GeneratorActor: the Monarch actor around a generator."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint
from torch import Tensor

from forge_trainer.config import GeneratorConfig, WeightsConfig
from forge_trainer.generation import make_generator
from forge_trainer.generation.desk import RequestDesk
from forge_trainer.pieces import StoreAddress, WeightChecksums, WeightsRef, WeightsVersion
from forge_trainer.status import GeneratorStatus
from forge_trainer.types import SamplingParams
from forge_trainer.weights.stores import open_store


class GeneratorActor(Actor):
    """One generator."""

    def __init__(
        self,
        config: GeneratorConfig,
        weights: WeightsConfig,
        model_dir: str,
    ) -> None:
        self._weights = weights
        self._generator = make_generator(config, weights, model_dir=Path(model_dir))
        self._desk = RequestDesk(self._generator.begin)

    @concurrent_endpoint
    async def open_store(self, address: StoreAddress) -> None:
        self._generator.use_store(open_store(address, self._weights))

    @concurrent_endpoint
    async def can_reach(self, token: str) -> bool:
        return os.access(token, os.R_OK | os.W_OK)

    @concurrent_endpoint
    async def setup(self) -> None:
        await self._generator.setup()

    @concurrent_endpoint
    async def generate(self, prompts: Sequence[str], sampling: SamplingParams) -> bytes:
        # Pickled here, since Monarch's cloudpickle asks Python about every single array.
        return pickle.dumps(await self._generator.generate(prompts, sampling), protocol=5)

    @concurrent_endpoint
    async def submit(self, requests: bytes, withdrawn: Sequence[str]) -> None:
        self._desk.submit(pickle.loads(requests), withdrawn)

    @concurrent_endpoint
    async def collect(self) -> bytes:
        return pickle.dumps(await self._desk.collect(), protocol=5)

    @concurrent_endpoint
    async def pause(self) -> None:
        await self._generator.pause()

    @concurrent_endpoint
    async def resume(self) -> None:
        await self._generator.resume()

    @concurrent_endpoint
    async def pull_weights(self, ref: WeightsRef | WeightsVersion | None) -> WeightsVersion:
        return await self._generator.pull_weights(ref)

    @concurrent_endpoint
    async def weight_checksums(self) -> WeightChecksums:
        return await self._generator.weight_checksums()

    @concurrent_endpoint
    async def read_weight(self, name: str) -> Tensor:
        return await self._generator.read_weight(name)

    @concurrent_endpoint
    async def status(self) -> GeneratorStatus:
        return await self._generator.get_status()

    @concurrent_endpoint
    async def close(self) -> None:
        await self._generator.close()
