"""Latency of a call to an actor, against an echo through a pipe and, if installed, a Ray actor."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from apps.bench.measure import Measure, Row, Spread, interleaved, ratios
from apps.bench.suites.step import both_trainers
from forge_trainer.config import TinyModelConfig

ROUNDS = 200


async def run() -> list[Row]:
    """get_status of one rank: milliseconds beyond what a pipe takes, and times what Ray takes."""
    with _pipe() as echo, _ray() as ray_call:
        async with both_trainers(TinyModelConfig()) as (trainer, _):
            measures = [_timed(trainer.get_status), _timed(echo)]
            if ray_call is not None:
                measures.append(_timed(ray_call))
            rounds = await interleaved(*measures, rounds=ROUNDS, warmup=20)
    added_ms = Spread.of([(call_s - pipe_s) * 1000 for call_s, pipe_s, *_ in rounds])
    rows = [Row("call_over_pipe_ms", "get_status, ms beyond an echo through a pipe", added_ms)]
    if ray_call is not None:
        against_ray = ratios([(call_s, ray_s) for call_s, _, ray_s in rounds])
        rows.append(Row("call_over_ray", "get_status / a call of a Ray actor", against_ray))
    return rows


def _timed(call: Callable[[], Awaitable[object]]) -> Measure:
    async def seconds() -> float:
        start = time.perf_counter()
        await call()
        return time.perf_counter() - start

    return seconds


@contextlib.contextmanager
def _pipe() -> Iterator[Callable[[], Awaitable[object]]]:
    """A process that sends back what it gets."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_echo, args=(theirs,), daemon=True)
    process.start()

    async def echo() -> object:
        ours.send("status")
        return ours.recv()

    try:
        yield echo
    finally:
        ours.send(None)
        process.join()


def _echo(pipe: Connection) -> None:
    while (message := pipe.recv()) is not None:
        pipe.send(message)


@contextlib.contextmanager
def _ray() -> Iterator[Callable[[], Awaitable[object]] | None]:
    """A Ray actor that answers at once; None where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        yield None
        return
    ray: Any = importlib.import_module("ray")
    with tempfile.TemporaryDirectory() as scratch:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=scratch,
        )
        actor = ray.remote(_Status).remote()

        async def call() -> object:
            return await actor.status.remote()

        try:
            yield call
        finally:
            ray.shutdown()


class _Status:
    def status(self) -> str:
        return "idle"
