"""The processes of a run, from first to last.

All processes start side by side, since importing is most of the start. Closing goes generator,
trainer, their processes, then the store; also after a failure or Ctrl-C, and nothing that fails
while closing keeps the rest from being closed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import ProcMesh

from forge_trainer.actors.generator import GeneratorActor
from forge_trainer.actors.trainer import TitanTrainer
from forge_trainer.config import GeneratorConfig, TrainerConfig, WeightsConfig
from forge_trainer.controller.checks import check_models, check_port
from forge_trainer.controller.ranks import TrainerSetup
from forge_trainer.controller.trainer import TrainerHandle
from forge_trainer.pieces import WeightsRef
from forge_trainer.tasks import first_error
from forge_trainer.weights.stores import open_store

from .handles import GeneratorHandle, MeshRanks
from .meshes import (
    STOP_TIMEOUT_S,
    closing,
    join_ranks,
    prepare_controller,
    running_mesh,
)
from .rank_logs import RankLogs
from .store import IN_MEMORY, RunStore

GENERATOR = "generator"


@dataclass(frozen=True, slots=True)
class Services:
    """What a controller works with."""

    trainer: TrainerHandle
    generator: GeneratorHandle
    reference: TrainerHandle | None
    """A second trainer that is never stepped."""
    store: RunStore

    async def restart_store(self) -> WeightsRef:
        """Replace a torchstore whose process is gone; the current weights go into the new one."""
        return await self.trainer.replace_store(self.store.restart)


@contextlib.asynccontextmanager
async def running_services(
    trainer: TrainerConfig,
    generator: GeneratorConfig,
    weights: WeightsConfig,
    *,
    model_dir: Path,
    checkpoint_folder: Path,
    reference: TrainerConfig | None = None,
    logs: RankLogs | None = None,
) -> AsyncIterator[Services]:
    """A store, a TitanTrainer mesh, a generator and perhaps a reference model, ready for calls.

    Without `logs`, the processes log errors only, to the console.

    Raises:
        ConfigError: the config does not fit the model, the trainer's port is in use, or shared
            memory is asked for and cannot be had.
    """
    trainers = {"trainer": trainer} | ({} if reference is None else {"reference": reference})
    check_models(model_dir, trainers.values(), generator, weights)
    for config in trainers.values():
        check_port(config)
    prepare_controller()
    async with contextlib.AsyncExitStack() as stack:
        store = RunStore(weights, stack)
        sizes = {name: (config.num_ranks, config.cpu_threads) for name, config in trainers.items()}
        meshes = {
            name: await stack.enter_async_context(
                running_mesh(name, num_processes=number, cpu_threads=threads, logs=logs)
            )
            for name, (number, threads) in (sizes | {GENERATOR: (1, generator.cpu_threads)}).items()
        }
        ranks = {
            name: await _spawn_ranks(meshes[name], config, weights, model_dir)
            for name, config in trainers.items()
        }
        generating = _spawn_generator(meshes[GENERATOR], generator, weights, model_dir)
        opened = {"trainer": await store.open([ranks["trainer"], generating])}
        if reference is not None:
            await ranks["reference"].open_store(IN_MEMORY)
            opened["reference"] = open_store(IN_MEMORY, weights)
        handles = {
            name: TrainerHandle(
                TrainerSetup(config, weights, model_dir, checkpoint_folder, opened[name]),
                ranks[name],
            )
            for name, config in trainers.items()
        }
        async with first_error() as starting:
            for name, handle in handles.items():
                starting.create_task(handle.setup(), name=name)
            starting.create_task(generating.setup(), name=GENERATOR)
        for name, handle in handles.items():
            # A save that runs beside other calls is let to its end.
            timeout_s = STOP_TIMEOUT_S + trainers[name].checkpoint_timeout_s
            stack.push_async_callback(closing, name, handle.close, timeout_s=timeout_s)
        stack.push_async_callback(closing, GENERATOR, generating.close)
        yield Services(handles["trainer"], generating, handles.get("reference"), store)


async def _spawn_ranks(
    mesh: ProcMesh, config: TrainerConfig, weights: WeightsConfig, model_dir: Path
) -> MeshRanks:
    await join_ranks(mesh, config.master_port)
    return MeshRanks(mesh.spawn("trainer", TitanTrainer, config, weights, str(model_dir)), config)


def _spawn_generator(
    mesh: ProcMesh, config: GeneratorConfig, weights: WeightsConfig, model_dir: Path
) -> GeneratorHandle:
    return GeneratorHandle(mesh.spawn("generator", GeneratorActor, config, weights, str(model_dir)))
