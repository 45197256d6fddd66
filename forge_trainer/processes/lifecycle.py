"""The processes of a run, from first to last.

All processes start side by side, since importing is most of the start. Closing goes generator,
trainer, their processes, then the store; also after a failure or Ctrl-C, and nothing that fails
while closing keeps the rest from being closed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from monarch.actor import ProcMesh

from forge_trainer.actors.trainer import TitanTrainer
from forge_trainer.config import (
    GeneratorConfig,
    LaunchConfig,
    PlacementConfig,
    Role,
    TrainerConfig,
    WeightsConfig,
)
from forge_trainer.controller.checks import check_models, check_port
from forge_trainer.controller.fleet import GeneratorFleet
from forge_trainer.controller.ranks import TrainerSetup
from forge_trainer.controller.trainer import TrainerHandle
from forge_trainer.pieces import WeightsRef
from forge_trainer.tasks import first_error
from forge_trainer.types import HostInventory
from forge_trainer.weights.stores import open_store

from .generators import Generators, spawn_generators, start_generator_meshes
from .handles import MeshRanks
from .hosts.inventory import find_inventory
from .hosts.launch import Hosts, running_hosts
from .hosts.needs import with_room
from .hosts.placement import MeshPlan, describe, plan_placement
from .meshes import (
    STOP_TIMEOUT_S,
    closing,
    join_ranks,
    points_of,
    prepare_controller,
    running_mesh,
)
from .rank_logs import RankLogs, controller_log
from .store import IN_MEMORY, RunStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Services:
    """What a controller works with."""

    trainer: TrainerHandle
    generator: GeneratorFleet
    reference: TrainerHandle | None
    """A second trainer that is never stepped."""
    store: RunStore

    async def restart_store(self) -> WeightsRef:
        """Replace a torchstore whose process is gone; the current weights go into the new one."""
        return await self.trainer.replace_store(self.store.restart)


@dataclass(frozen=True, slots=True)
class Site:
    """Where a run's processes live, and where they log."""

    launch: LaunchConfig = field(default_factory=LaunchConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    logs: RankLogs | None = None
    """Without, the processes log errors only, to the console."""
    inventory: HostInventory | None = None
    """Of each host; None finds out."""

    @property
    def log_folder(self) -> Path | None:
        return Path(self.logs.folder) if self.logs else None


@contextlib.asynccontextmanager
async def running_services(
    trainer: TrainerConfig,
    generator: GeneratorConfig,
    weights: WeightsConfig,
    *,
    model_dir: Path,
    checkpoint_folder: Path,
    reference: TrainerConfig | None = None,
    site: Site = Site(),
) -> AsyncIterator[Services]:
    """A store, a TitanTrainer mesh, a generator and perhaps a reference model, ready for calls.

    Raises:
        ConfigError: the config does not fit the model or the hosts, the trainer's port is in use,
            or shared memory is asked for and cannot be had.
    """
    trainers = _trainers(trainer, reference)
    inventory = site.inventory or find_inventory(site.launch)
    asked = (trainers, generator, site.placement, site.launch, inventory)
    plan_placement(*asked)
    check_models(model_dir, trainers.values(), generator, weights, gpus=inventory.gpus)
    if site.launch.kind == "local":
        for config in trainers.values():
            check_port(config)
        weights = with_room(weights, model_dir)
    # As everybody will see them, also those who work elsewhere.
    model_dir, checkpoint_folder = model_dir.absolute(), checkpoint_folder.absolute()
    prepare_controller()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(controller_log(site.logs))
        hosts = await stack.enter_async_context(running_hosts(site.launch, site.log_folder))
        plans = plan_placement(*asked, hosts.cores)
        await _require_shared(hosts, trainers["trainer"], model_dir, checkpoint_folder, site)
        store = RunStore(weights, stack, hosts.place(plans["trainer"]))
        meshes = await _start_meshes(stack, hosts, [plans[role] for role in trainers], site.logs)
        generator_meshes = await start_generator_meshes(stack, hosts, plans["generator"], site.logs)
        ranks = {
            role: await _join_ranks(hosts, plans[role], meshes[role], config, weights, model_dir)
            for role, config in trainers.items()
        }
        generating = spawn_generators(
            generator_meshes,
            generator.model_copy(update={"device": plans["generator"].device}),
            weights,
            model_dir,
            hosts.names(plans["generator"]),
        )
        opened = {"trainer": await store.open([ranks["trainer"], generating])}
        if reference is not None:
            await ranks["reference"].open_store(IN_MEMORY)
            opened["reference"] = open_store(IN_MEMORY, weights)
        handles = {
            role: TrainerHandle(
                TrainerSetup(config, weights, model_dir, checkpoint_folder, opened[role]),
                ranks[role],
            )
            for role, config in trainers.items()
        }
        await _set_up(stack, handles, trainers, generating)
        yield Services(handles["trainer"], generating.fleet, handles.get("reference"), store)


async def _set_up(
    stack: contextlib.AsyncExitStack,
    handles: Mapping[Role, TrainerHandle],
    trainers: Mapping[Role, TrainerConfig],
    generators: Generators,
) -> None:
    """Load all models side by side; they are closed with `stack`."""
    async with first_error() as starting:
        for role, handle in handles.items():
            starting.create_task(handle.setup(), name=role)
        starting.create_task(generators.setup(), name="generators")
    for role, handle in handles.items():
        # A save that runs beside other calls is let to its end.
        timeout_s = STOP_TIMEOUT_S + trainers[role].checkpoint_timeout_s
        stack.push_async_callback(closing, role, handle.close, timeout_s=timeout_s)
    stack.push_async_callback(closing, "generators", generators.fleet.close)


def _trainers(trainer: TrainerConfig, reference: TrainerConfig | None) -> dict[Role, TrainerConfig]:
    found: dict[Role, TrainerConfig] = {"trainer": trainer}
    return found if reference is None else {**found, "reference": reference}


def on_device(config: TrainerConfig, plan: MeshPlan) -> TrainerConfig:
    """What the ranks are told: nobody guesses a device, or where a relative path begins."""
    profiling = config.profiling
    if profiling.folder is not None:
        profiling = profiling.model_copy(update={"folder": str(Path(profiling.folder).absolute())})
    changes = {"device": plan.device, "cpu_threads": plan.cpu_threads, "profiling": profiling}
    return config.model_copy(update=changes)


async def _require_shared(
    hosts: Hosts, trainer: TrainerConfig, model_dir: Path, checkpoint_folder: Path, site: Site
) -> None:
    """Raises ConfigError for a folder that is not there on every host."""
    await hosts.require_seen("model.path", str(model_dir / "config.json"))
    folders = {"trainer.checkpoint_folder": checkpoint_folder}
    if site.logs is not None:
        folders["run.folder"] = Path(site.logs.folder)
    if trainer.profiling.folder is not None:
        folders["trainer.profiling.folder"] = Path(trainer.profiling.folder).absolute()
    for key, folder in folders.items():
        await hosts.require_shared(key, folder)


async def _start_meshes(
    stack: contextlib.AsyncExitStack, hosts: Hosts, plans: Sequence[MeshPlan], logs: RankLogs | None
) -> dict[Role, ProcMesh]:
    """All at once; not waited for."""
    meshes: dict[Role, ProcMesh] = {}
    for plan in plans:
        logger.info("%s", describe(plan))
        meshes[plan.role] = await stack.enter_async_context(
            running_mesh(
                plan.role,
                num_processes=plan.per_host,
                cpu_threads=plan.cpu_threads,
                logs=logs,
                place=hosts.place(plan),
            )
        )
    return meshes


async def _join_ranks(
    hosts: Hosts,
    plan: MeshPlan,
    mesh: ProcMesh,
    config: TrainerConfig,
    weights: WeightsConfig,
    model_dir: Path,
) -> MeshRanks:
    await join_ranks(mesh, *await hosts.master(plan, config.master_port))
    return _spawn_ranks(mesh, on_device(config, plan), weights, model_dir, hosts.names(plan))


def _spawn_ranks(
    mesh: ProcMesh,
    config: TrainerConfig,
    weights: WeightsConfig,
    model_dir: Path,
    host_names: Sequence[str | None] = (),
) -> MeshRanks:
    """Actors in processes that know their ranks."""
    actors = mesh.spawn("trainer", TitanTrainer, config, weights, str(model_dir))
    by_rank = [actors.slice(**point) for point in points_of(mesh)]
    return MeshRanks(by_rank, config, hosts=host_names)
