"""What a call costs the controller before anything is sent: validate, pack, serialise."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import torch

from apps.bench.measure import Row, Spread, interleaved, ratios
from forge_trainer.config import PackingConfig, TrainerConfig
from forge_trainer.controller.batches import BatchDealer
from forge_trainer.status import EngineFacts
from forge_trainer.types import TrainSequence

ROUNDS = 9
SEQUENCES, TOKENS = 512, 4096
FIELDS = ("token_ids", "loss_mask", "advantages", "generator_logprobs", "token_weights")
HEARTBEAT_S = 0.0005


async def run() -> list[Row]:
    """Both sides on the same 2 M tokens in NumPy arrays, for two data-parallel ranks."""
    torch.set_num_threads(1)
    sequences, dealer, blocks = _sequences(), _dealer(), []

    async def through_the_controller() -> float:
        async with _longest_block() as longest:
            start = time.perf_counter()
            call = await dealer.prepare(sequences, "grpo", None, return_logprobs=False)
            # As Monarch does with the arguments of a message, on the event loop.
            for rows in call.packed.ranks:
                pickle.dumps(rows, protocol=5)
            seconds = time.perf_counter() - start
        blocks.append(longest[0] * 1000)
        return seconds

    async def through_numpy() -> float:
        start = time.perf_counter()
        for half in (sequences[::2], sequences[1::2]):
            columns = [np.concatenate([getattr(s, name) for s in half]) for name in FIELDS]
            pickle.dumps(columns, protocol=5)
        return time.perf_counter() - start

    pairs = await interleaved(through_the_controller, through_numpy, rounds=ROUNDS)
    size = f"{SEQUENCES} x {TOKENS} tokens"
    return [
        Row("controller_over_numpy", f"validate, pack, pickle {size}", ratios(pairs), bar=2.0),
        Row("controller_block_ms", "longest block of the loop", Spread.of(blocks[2:]), bar=50.0),
    ]


def _sequences() -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    mask = np.arange(TOKENS) >= TOKENS // 4

    def numbers() -> Any:
        return rng.standard_normal(TOKENS, np.float32)

    return [
        TrainSequence(
            token_ids=rng.integers(0, 1000, TOKENS, np.int32),
            loss_mask=mask,
            advantages=numbers(),
            generator_logprobs=-(numbers() ** 2),
            token_weights=numbers(),
        )
        for _ in range(SEQUENCES)
    ]


def _dealer() -> BatchDealer:
    facts = [
        EngineFacts("none", 1000, TOKENS, 0, rank, 2, {"dp": rank}, True, "cpu") for rank in (0, 1)
    ]
    config = TrainerConfig(num_ranks=2, packing=PackingConfig(max_row_tokens=2 * TOKENS))
    nobody: Any = None
    return BatchDealer(nobody, facts, config)


@contextlib.asynccontextmanager
async def _longest_block() -> AsyncIterator[Sequence[float]]:
    """Seconds that the event loop was busy at most, filled in at the end."""
    longest = [0.0]

    async def beat() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now = time.perf_counter()
            longest[0] = max(longest[0], now - last - HEARTBEAT_S)
            last = now

    beating = asyncio.create_task(beat(), name="heartbeat")
    await asyncio.sleep(0)
    try:
        yield longest
        await asyncio.sleep(2 * HEARTBEAT_S)
    finally:
        beating.cancel()
