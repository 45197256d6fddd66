"""Latency of a call to an actor, against an echo through a pipe."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

from apps.bench.measure import Row, Spread, interleaved
from apps.bench.suites.step import both_trainers
from forge_trainer.config.schema import TinyModelConfig

ROUNDS = 200


async def run() -> list[Row]:
    """get_status of one rank: milliseconds beyond what a pipe between two processes takes."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    echo = multiprocessing.get_context("spawn").Process(target=_echo, args=(theirs,), daemon=True)
    echo.start()
    try:
        async with both_trainers(TinyModelConfig()) as (trainer, _):

            async def call() -> float:
                start = time.perf_counter()
                await trainer.get_status()
                return time.perf_counter() - start

            async def pipe() -> float:
                start = time.perf_counter()
                ours.send("status")
                ours.recv()
                return time.perf_counter() - start

            pairs = await interleaved(call, pipe, rounds=ROUNDS, warmup=20)
    finally:
        ours.send(None)
        echo.join()
    added_ms = Spread.of([(call_s - pipe_s) * 1000 for call_s, pipe_s in pairs])
    return [Row("call_over_pipe_ms", "get_status, ms beyond an echo through a pipe", added_ms)]


def _echo(pipe: Connection) -> None:
    while (message := pipe.recv()) is not None:
        pipe.send(message)
