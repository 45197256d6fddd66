"""The processes of a run, from first to last: start in order, close in reverse order.

Order: store, then trainer and generator side by side. Closing is the same backwards, also after
a failure or Ctrl-C, and nothing that fails while closing keeps the rest from being closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import torchstore as ts
from monarch.actor import ProcMesh

from forge_trainer.actors.generator import TransformersGeneratorActor
from forge_trainer.actors.trainer import TitanTrainer
from forge_trainer.config.schema import GeneratorConfig, TrainerConfig, WeightsConfig
from forge_trainer.errors import ConfigError

from .handles import GeneratorHandle, MeshRanks
from .meshes import join_ranks, prepare_controller, spawn_mesh
from .trainer import TrainerHandle, TrainerSetup

logger = logging.getLogger(__name__)

STORE_NAME = "forge_trainer"
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Services:
    """What a controller works with."""

    trainer: TrainerHandle
    generator: GeneratorHandle


@contextlib.asynccontextmanager
async def running_store() -> AsyncIterator[str]:
    """A torchstore with one volume in a process of its own; yields its name.

    Raises:
        ConfigError: this controller runs a store already.
    """
    prepare_controller()
    async with _running_mesh("store", num_processes=1, cpu_threads=1) as mesh:
        try:
            await ts.initialize(mesh=mesh, store_name=STORE_NAME)
        except Exception as error:
            if "already initialized" not in str(error):
                raise
            raise ConfigError(
                "this process runs a weight store already; close the other run first"
            ) from error
        try:
            yield STORE_NAME
        finally:
            await _closing("store", lambda: ts.shutdown(STORE_NAME))


@contextlib.asynccontextmanager
async def running_trainer(
    config: TrainerConfig,
    *,
    weights: WeightsConfig,
    model_dir: Path,
    checkpoint_folder: Path,
    store_name: str,
) -> AsyncIterator[TrainerHandle]:
    """A TitanTrainer mesh, set up, behind its handle."""
    async with _running_mesh(
        "trainer", num_processes=config.num_ranks, cpu_threads=config.cpu_threads
    ) as mesh:
        await join_ranks(mesh, config.master_port)
        actors = mesh.spawn("trainer", TitanTrainer, config, weights, str(model_dir), store_name)
        ranks = MeshRanks(
            actors,
            num_ranks=config.num_ranks,
            collective_timeout_s=config.collective_timeout_s,
        )
        handle = TrainerHandle(TrainerSetup(config, weights, model_dir, checkpoint_folder), ranks)
        await handle.setup()
        try:
            yield handle
        finally:
            await _closing("trainer", handle.close)


@contextlib.asynccontextmanager
async def running_generator(
    config: GeneratorConfig,
    *,
    weights: WeightsConfig,
    model_dir: Path,
    store_name: str,
    seed: int,
) -> AsyncIterator[GeneratorHandle]:
    """A generator actor, set up, behind its handle."""
    async with _running_mesh(
        "generator", num_processes=1, cpu_threads=config.cpu_threads
    ) as mesh:
        actor = mesh.spawn(
            "generator",
            TransformersGeneratorActor,
            config,
            weights,
            str(model_dir),
            store_name,
            seed,
        )
        handle = GeneratorHandle(actor)
        await handle.setup()
        try:
            yield handle
        finally:
            await _closing("generator", handle.close)


@contextlib.asynccontextmanager
async def _running_mesh(
    name: str, *, num_processes: int, cpu_threads: int
) -> AsyncIterator[ProcMesh]:
    mesh = spawn_mesh(name, num_processes=num_processes, cpu_threads=cpu_threads)
    try:
        yield mesh
    finally:
        await _closing(f"{name} processes", lambda: mesh.stop("closed"))


async def _closing(what: str, close: Callable[[], Awaitable[object]]) -> None:
    """Close one thing; a failure is logged, since the rest must be closed as well."""
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await close()
    except Exception as error:
        logger.warning("closing the %s failed: %s: %s", what, type(error).__name__, error)
