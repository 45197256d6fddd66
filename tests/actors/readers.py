"""Readers and publishers of weights in processes of their own, for tests of faults."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence

import torch
from monarch.actor import Actor, concurrent_endpoint, endpoint

from forge_trainer.config import WeightsConfig
from forge_trainer.errors import WeightsError
from forge_trainer.pieces import RankPieces, StoreAddress, WeightPiece, WeightsVersion
from forge_trainer.weights.stores import open_store

SHAPES = {f"t{i}": (16, 8 + i) for i in range(4)}


class Reader(Actor):
    """Reads what others publish; no checksum would tell it of a mixture."""

    def __init__(self, address: StoreAddress, weights: WeightsConfig, seed: int) -> None:
        self._store = open_store(address, weights)
        self._random = random.Random(seed)
        self._holding: asyncio.Task[None] | None = None
        self._num_versions = 0

    @concurrent_endpoint
    async def is_ready(self) -> bool:
        return True

    @concurrent_endpoint
    async def follow(self, last: WeightsVersion) -> list[WeightsVersion]:
        """The versions read until `last` was; each must be whole, and none older than the last.

        Raises:
            AssertionError: they were not.
        """
        live = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        seen: list[WeightsVersion] = []
        while not seen or seen[-1] < last:
            await asyncio.sleep(self._random.uniform(0, 0.01))
            try:
                async with self._store.reading() as reading:
                    await asyncio.sleep(self._random.choice([0, 0, 0.02]))
                    await reading.load_into(live)
                    version = reading.manifest.version
            except WeightsError as error:
                if "no weights are published yet" in str(error):
                    continue
                raise
            values = {float(value) for tensor in live.values() for value in tensor.unique()}
            assert values == {float(version.policy_version)}, f"{version} holds {values}"
            assert not seen or seen[-1] <= version, f"{version} after {seen[-1]}"
            seen.append(version)
            self._num_versions = len(set(seen))
        return seen

    @concurrent_endpoint
    async def num_versions(self) -> int:
        """Different ones that were read so far."""
        return self._num_versions

    @concurrent_endpoint
    async def hold(self, version: WeightsVersion) -> int:
        """Begin to read and never end; this process's id."""
        held = asyncio.Event()

        async def read() -> None:
            async with self._store.reading(version):
                held.set()
                await asyncio.Event().wait()

        self._holding = asyncio.create_task(read())
        await held.wait()
        return os.getpid()


class Writer(Actor):
    """A rank that publishes what it is given."""

    def __init__(self, address: StoreAddress, weights: WeightsConfig) -> None:
        self._store = open_store(address, weights)

    @endpoint
    async def write(
        self, version: WeightsVersion, rank: int, pieces: Sequence[WeightPiece]
    ) -> RankPieces:
        return await self._store.write(self._store.stage(version, rank, pieces))
