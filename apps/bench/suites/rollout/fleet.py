"""What a second generator brings, where sampling takes a fixed time and no core.

Both are actors over Monarch, as in a run; what they sample with only waits, so that two of them do
not share what one has.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

from torch import Tensor

from apps.bench.measure import Measure, Row, interleaved, ratios
from forge_trainer.actors.generator import GeneratorActor
from forge_trainer.config import GeneratorConfig, WeightsConfig
from forge_trainer.controller.fleet import GeneratorFleet
from forge_trainer.generation import ModelGenerator
from forge_trainer.pieces import TensorFacts, WeightsVersion
from forge_trainer.processes.generator_handle import GeneratorHandle
from forge_trainer.processes.meshes import prepare_controller, running_mesh
from forge_trainer.types import Completion, GenerationRequest, SamplingParams

ROUNDS = 9
STEP_S, STEPS = 0.025, 8
"""A request takes 200 ms."""
SLOTS, GROUPS, GROUP_SIZE = 8, 16, 8
SAMPLING = SamplingParams(max_completion_tokens=STEPS)
COMPLETION = Completion([0], [], [], [], "", temperature=1.0, stop_reason="length")


async def run() -> list[Row]:
    """The same requests, all at once, through a fleet of one and a fleet of two."""
    prepare_controller()
    config = GeneratorConfig(batch_size=SLOTS, device="cpu")
    async with contextlib.AsyncExitStack() as stack:
        handles = {}
        for number in range(2):
            mesh = await stack.enter_async_context(
                running_mesh("generator", num_processes=1, cpu_threads=1, first_rank=number)
            )
            actor = mesh.spawn(
                "generator", GeneratorActor, config, WeightsConfig(), "", make_waiting
            )
            handles[f"generator/{number}"] = GeneratorHandle(actor, name=f"generator/{number}")
        await asyncio.gather(*(handle.setup() for handle in handles.values()))
        one, two = _fleet(dict(list(handles.items())[:1])), _fleet(handles)
        stack.push_async_callback(two.close)
        rounds = await interleaved(_answering(one), _answering(two), rounds=ROUNDS)
    what = f"completions per second of two generators / one, {STEPS * STEP_S * 1000:.0f} ms each"
    return [Row("generators_2_over_1", what, ratios(rounds), floor=1.8)]


def _fleet(handles: dict[str, GeneratorHandle]) -> GeneratorFleet:
    return GeneratorFleet(handles, slots=SLOTS, request_timeout_s=600.0)


def _answering(fleet: GeneratorFleet) -> Measure:
    """Seconds until all requests have been answered."""

    async def seconds() -> float:
        requests = [
            GenerationRequest([0], SAMPLING, group=str(group))
            for group in range(GROUPS)
            for _ in range(GROUP_SIZE)
        ]
        start = time.perf_counter()
        await asyncio.gather(*map(fleet.generate_one, requests))
        return time.perf_counter() - start

    return seconds


def make_waiting(
    config: GeneratorConfig, weights: WeightsConfig, *, model_dir: Path
) -> ModelGenerator:
    """A generator whose every step takes the same time, whatever runs."""
    return ModelGenerator(_Waiting(), config)


class _Waiting:
    """Keeps `Backend`: a request ends after `max_completion_tokens` steps, which only wait."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._left: dict[str, int] = {}

    def load(self) -> None:
        """There is nothing to load."""

    def encode(self, prompt: str) -> list[int]:
        return [0]

    def check(self, request: GenerationRequest) -> None:
        """All are good."""

    def add(self, request: GenerationRequest) -> None:
        self._left[request.id] = request.sampling.max_completion_tokens

    def cancel(self, request_id: str) -> None:
        self._left.pop(request_id, None)

    def step(self) -> list[tuple[str, Completion]]:
        time.sleep(STEP_S)
        self._left = {request_id: left - 1 for request_id, left in self._left.items()}
        ended = [request_id for request_id, left in self._left.items() if not left]
        for request_id in ended:
            del self._left[request_id]
        return [(request_id, COMPLETION) for request_id in ended]

    @property
    def num_unfinished(self) -> int:
        return len(self._left)

    def use_weights(self, version: WeightsVersion, *, keep_cache: bool) -> None:
        """It has none."""

    def checksums(self) -> dict[str, TensorFacts]:
        return {}

    def read_weight(self, name: str) -> Tensor:
        return self.tensors[name]

    def close(self) -> None:
        """There is nothing to close."""
