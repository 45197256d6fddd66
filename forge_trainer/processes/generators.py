"""The generators of a run: each a mesh of its own, so that one that dies takes no other with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import ProcMesh

from forge_trainer.actors.generator import GeneratorActor
from forge_trainer.config import GeneratorConfig, WeightsConfig
from forge_trainer.controller.fleet import GeneratorFleet
from forge_trainer.errors import WorkerLostError
from forge_trainer.pieces import StoreAddress
from forge_trainer.tasks import first_error

from .generator_handle import GeneratorHandle
from .hosts.launch import Hosts
from .hosts.placement import MeshPlan, describe, plans_of_processes
from .meshes import running_mesh
from .rank_logs import RankLogs

logger = logging.getLogger(__name__)

GENERATOR = "generator"


async def start_generator_meshes(
    stack: contextlib.AsyncExitStack, hosts: Hosts, plan: MeshPlan, logs: RankLogs | None
) -> list[ProcMesh]:
    """One for every process of the plan, all at once; not waited for."""
    logger.info("%s", describe(plan))
    return [
        await stack.enter_async_context(
            running_mesh(
                GENERATOR,
                num_processes=1,
                cpu_threads=one.cpu_threads,
                logs=logs,
                place=hosts.place(one),
                first_rank=number,
            )
        )
        for number, one in enumerate(plans_of_processes(plan))
    ]


@dataclass(frozen=True, slots=True)
class Generators:
    """All of them, and the fleet that they are to whoever samples."""

    handles: Mapping[str, GeneratorHandle]
    """By name: generator, or generator/0 and so on."""
    fleet: GeneratorFleet

    async def setup(self) -> None:
        """Load all models side by side."""
        async with first_error() as starting:
            for name, handle in self.handles.items():
                starting.create_task(handle.setup(), name=name)

    async def can_reach(self, token: str) -> bool:
        """True if all see that file."""
        return all(await asyncio.gather(*(one.can_reach(token) for one in self.handles.values())))

    async def open_store(self, address: StoreAddress) -> None:
        """Let those that are left pull from this store from now on."""
        await asyncio.gather(*(self._open_store(name, address) for name in self.fleet.replicas))

    async def _open_store(self, name: str, address: StoreAddress) -> None:
        try:
            await self.handles[name].open_store(address)
        except WorkerLostError as error:
            # The fleet finds out by its next call, and may do without it.
            logger.warning("%s does not get the new store: %s", name, error)


def spawn_generators(
    meshes: Sequence[ProcMesh],
    config: GeneratorConfig,
    weights: WeightsConfig,
    model_dir: Path,
    hosts: Sequence[str | None],
) -> Generators:
    """An actor in every mesh; `hosts` are their names in messages, None where there is one."""
    handles = {}
    for number, (mesh, host) in enumerate(zip(meshes, hosts, strict=True)):
        name = GENERATOR if len(meshes) == 1 else f"{GENERATOR}/{number}"
        # Or all would draw the same numbers.
        own = config.model_copy(update={"seed": (config.seed or 0) + number})
        actor = mesh.spawn(GENERATOR, GeneratorActor, own, weights, str(model_dir))
        handles[name] = GeneratorHandle(actor, name=name, host=host)
    fleet = GeneratorFleet(
        handles, slots=config.batch_size, request_timeout_s=config.request_timeout_s
    )
    return Generators(handles, fleet)
