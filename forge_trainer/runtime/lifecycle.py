"""The processes of a run, from first to last.

All processes start side by side, since importing is most of the start. Closing goes generator,
trainer, store, then their processes; also after a failure or Ctrl-C, and nothing that fails
while closing keeps the rest from being closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import ProcMesh

from forge_trainer.actors.generator import TransformersGeneratorActor
from forge_trainer.actors.trainer import TitanTrainer
from forge_trainer.config.schema import GeneratorConfig, WeightsConfig
from forge_trainer.config.trainer import TrainerConfig

from .checks import check_generator, check_trainer
from .handles import GeneratorHandle, MeshRanks
from .meshes import (
    join_ranks,
    prepare_controller,
    require_free_port,
    spawn_mesh,
    start_store,
    stop_store,
)
from .tasks import first_error, to_the_end
from .trainer import TrainerHandle, TrainerSetup

logger = logging.getLogger(__name__)

STORE_NAME = "forge_trainer"
STOP_TIMEOUT_S = 40.0
"""Monarch stops processes only once they have started, which can take half of this."""


@dataclass(frozen=True, slots=True)
class Services:
    """What a controller works with."""

    trainer: TrainerHandle
    generator: GeneratorHandle
    reference: TrainerHandle | None = None
    """A second trainer that is never stepped."""


@contextlib.asynccontextmanager
async def running_services(
    trainer: TrainerConfig,
    generator: GeneratorConfig,
    weights: WeightsConfig,
    *,
    model_dir: Path,
    checkpoint_folder: Path,
    seed: int = 0,
    reference: TrainerConfig | None = None,
) -> AsyncIterator[Services]:
    """A store, a TitanTrainer mesh, a generator and perhaps a reference model, ready for calls.

    Raises:
        ConfigError: the config does not fit the model, the trainer's port is in use, or this
            process runs services already.
    """
    trainers = {"trainer": trainer} | ({} if reference is None else {"reference": reference})
    for config in trainers.values():
        check_trainer(model_dir, config)
        if config.master_port is not None:
            require_free_port(config.master_port)
    check_generator(model_dir, generator)
    prepare_controller()
    async with contextlib.AsyncExitStack() as stack:
        store_mesh = await stack.enter_async_context(_running_mesh("store", 1, 1))
        trainer_meshes = {
            name: await stack.enter_async_context(
                _running_mesh(name, config.num_ranks, config.cpu_threads)
            )
            for name, config in trainers.items()
        }
        generator_mesh = await stack.enter_async_context(
            _running_mesh("generator", 1, generator.cpu_threads)
        )
        async with first_error() as starting:
            starting.create_task(to_the_end(_open_store(store_mesh, stack)), name="store")
            training = {
                name: starting.create_task(
                    _start_trainer(
                        trainer_meshes[name],
                        TrainerSetup(config, weights, model_dir, checkpoint_folder),
                    ),
                    name=name,
                )
                for name, config in trainers.items()
            }
            generating = starting.create_task(
                _start_generator(generator_mesh, generator, weights, model_dir, seed),
                name="generator",
            )
        handles = {name: task.result() for name, task in training.items()}
        for name, handle in handles.items():
            # A save that runs beside other calls is let to its end.
            timeout_s = STOP_TIMEOUT_S + trainers[name].checkpoint_timeout_s
            stack.push_async_callback(_closing, name, handle.close, timeout_s=timeout_s)
        stack.push_async_callback(_closing, "generator", generating.result().close)
        yield Services(handles["trainer"], generating.result(), handles.get("reference"))


async def _open_store(mesh: ProcMesh, stack: contextlib.AsyncExitStack) -> None:
    """Start the store, and see to its end from the moment it runs, whatever else fails."""
    await start_store(mesh, STORE_NAME)
    stack.push_async_callback(_closing, "store", lambda: stop_store(STORE_NAME))


async def _start_trainer(mesh: ProcMesh, setup: TrainerSetup) -> TrainerHandle:
    config = setup.trainer
    await join_ranks(mesh, config.master_port)
    actors = mesh.spawn(
        "trainer", TitanTrainer, config, setup.weights, str(setup.model_dir), STORE_NAME
    )
    ranks = MeshRanks(actors, config)
    handle = TrainerHandle(setup, ranks)
    await handle.setup()
    return handle


async def _start_generator(
    mesh: ProcMesh, config: GeneratorConfig, weights: WeightsConfig, model_dir: Path, seed: int
) -> GeneratorHandle:
    actor = mesh.spawn(
        "generator",
        TransformersGeneratorActor,
        config,
        weights,
        str(model_dir),
        STORE_NAME,
        seed,
    )
    handle = GeneratorHandle(actor)
    await handle.setup()
    return handle


@contextlib.asynccontextmanager
async def _running_mesh(name: str, num_processes: int, cpu_threads: int) -> AsyncIterator[ProcMesh]:
    mesh = spawn_mesh(name, num_processes=num_processes, cpu_threads=cpu_threads)
    try:
        yield mesh
    finally:
        await _closing(f"{name} processes", lambda: mesh.stop("closed"))


async def _closing(
    what: str, close: Callable[[], Awaitable[object]], *, timeout_s: float = STOP_TIMEOUT_S
) -> None:
    """Close one thing; a failure is logged, since the rest must be closed as well."""
    try:
        async with asyncio.timeout(timeout_s):
            await close()
    except Exception as error:
        logger.warning("closing the %s failed: %r", what, error)
