"""How long a generator stands still while it pulls, against copying the same bytes in memory.

Publisher and generator are in this process, with shared memory between them; the generator's model
is nothing but tensors, and completes prompts at once.
"""

from __future__ import annotations

import asyncio
import time

import torch
from torch import Tensor

from apps.bench.measure import Row, Spread, interleaved, ratios
from forge_trainer.config import GeneratorConfig
from forge_trainer.functional.pieces.manifests import build_manifest
from forge_trainer.generation.generator import ModelGenerator
from forge_trainer.pieces import TensorFacts, WeightPiece, WeightsVersion
from forge_trainer.types import Completion, GenerationRequest, SamplingParams
from forge_trainer.weights.shared_memory.folder import shared_folder
from forge_trainer.weights.shared_memory.store import SharedMemoryWeightStore

ROUNDS = 9
SHAPE, TENSORS = (512, 1024), 128
"""256 MB in float32."""
SAMPLING = SamplingParams(max_completion_tokens=1)
COMPLETION = Completion([0], [], [], [], "", temperature=1.0, stop_reason="length")


async def run() -> list[Row]:
    """All of a version is fetched and verified (`verify: full`) before the copy."""
    torch.set_num_threads(1)
    live = _tensors()
    sources, targets = list(_tensors().values()), list(_tensors().values())
    generator = ModelGenerator(_Instant(live), GeneratorConfig())
    await generator.setup()
    pulls: list[float] = []
    with shared_folder() as folder:
        store = SharedMemoryWeightStore(folder)
        generator.use_store(store)
        number = 0

        async def stall() -> float:
            nonlocal number
            number += 1
            version = WeightsVersion(0, number)
            await _publish(store, version)
            start = time.perf_counter()
            pulling = asyncio.create_task(generator.pull_weights(version), name="pull")
            longest = 0.0
            while not pulling.done():
                asked = time.perf_counter()
                await generator.generate_one(GenerationRequest([0], SAMPLING))
                longest = max(longest, time.perf_counter() - asked)
            pulls.append(time.perf_counter() - start)
            if number > 2:
                await store.drop(WeightsVersion(0, number - 2))
            return longest

        async def copy() -> float:
            start = time.perf_counter()
            torch._foreach_copy_(targets, sources)
            return time.perf_counter() - start

        pairs = await interleaved(stall, copy, rounds=ROUNDS, warmup=4)
        await generator.close()
    what = f"longest wait of a request during a pull / copy of {TENSORS} x 2 MB"
    shares = Spread.of([pair[0] / pull for pair, pull in zip(pairs, pulls[4:], strict=True)])
    return [
        Row("pull_stall_over_copy", what, ratios(pairs), bar=1.3),
        Row("pull_stall_over_pull", "the same wait / the whole pull", shares),
    ]


def _tensors() -> dict[str, Tensor]:
    return {f"t{i}": torch.ones(SHAPE) for i in range(TENSORS)}


async def _publish(store: SharedMemoryWeightStore, version: WeightsVersion) -> None:
    pieces = [
        WeightPiece(name, SHAPE, (0, 0), tensor, torch.float32)
        for name, tensor in _tensors().items()
    ]
    staged = await asyncio.to_thread(store.stage, version, 0, pieces)
    written = await store.write(staged)
    await store.commit(build_manifest(version, store.transport, [written]))


class _Instant:
    """Keeps `Backend`: a request ends at its first step, with nothing sampled."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self._added: list[str] = []

    def load(self) -> None:
        """There is nothing to load."""

    def encode(self, prompt: str) -> list[int]:
        return [0]

    def check(self, request: GenerationRequest) -> None:
        """All are good."""

    def add(self, request: GenerationRequest) -> None:
        self._added.append(request.id)

    def cancel(self, request_id: str) -> None:
        self._added.remove(request_id)

    def step(self) -> list[tuple[str, Completion]]:
        added, self._added = self._added, []
        return [(request_id, COMPLETION) for request_id in added]

    @property
    def num_unfinished(self) -> int:
        return len(self._added)

    def use_weights(self, version: WeightsVersion, *, keep_cache: bool) -> None:
        """It runs on the tensors themselves."""

    def checksums(self) -> dict[str, TensorFacts]:
        return {}

    def read_weight(self, name: str) -> Tensor:
        return self.tensors[name]

    def close(self) -> None:
        """There is nothing to close."""
