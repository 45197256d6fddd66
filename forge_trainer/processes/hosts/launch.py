"""Where the hosts of a run come from: this machine, a scheduler, or workers that wait for us."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch.actor import HostMesh
from monarch.config import configured

from forge_trainer.actors.guard import HostFacts
from forge_trainer.config import LaunchConfig, Role
from forge_trainer.errors import ConfigError
from forge_trainer.processes.meshes import Place

from .guards import HostGuards, guarded
from .jobs import start_hosts
from .placement import MeshPlan

logger = logging.getLogger(__name__)

SPAWN_TIMEOUT = "120s"
DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a run. On this machine alone there are no meshes of hosts and no guards."""

    launch: LaunchConfig
    meshes: Mapping[Role, HostMesh]
    guards: HostGuards | None

    def place(self, plan: MeshPlan) -> Place:
        """Where the processes of a plan go, and what they find there."""
        environment = process_environment(plan, self.launch)
        if not self.meshes:
            return Place(environment=environment)
        assert self.guards is not None, "hosts have guards"
        first = plan.first_host
        facts = self.guards.facts[plan.hosts][first : first + plan.num_hosts]
        by_host = [{DEVICES: ",".join(names)} for names in gpus_of(plan, facts)]
        mesh = self.meshes[plan.hosts]
        if plan.num_hosts < self.launch.num_hosts[plan.hosts]:
            mesh = mesh.slice(hosts=slice(first, first + plan.num_hosts))
        return Place(
            mesh, plan.hosts, environment, self.launch.python, first_host=first, by_host=by_host
        )

    @property
    def cores(self) -> dict[Role, int]:
        """Of a host of each mesh, the one that has fewest; empty where they were known before."""
        if self.guards is None or self.launch.kind == "processes":
            return {}
        return {
            role: min(fact.inventory.cores or 1 for fact in facts)
            for role, facts in self.guards.facts.items()
        }

    def names(self, plan: MeshPlan) -> list[str | None]:
        """The host of every rank, for messages; None where there is one only."""
        if self.guards is None:
            return [None] * plan.num_processes
        facts = self.guards.facts[plan.hosts]
        ranks = range(plan.num_processes)
        numbers = [plan.first_host + rank // plan.per_host for rank in ranks]
        return [f"{plan.hosts}/{number} ({facts[number].host})" for number in numbers]

    async def master(self, plan: MeshPlan, port: int | None) -> tuple[int | None, str]:
        """Port and address at which rank 0 listens for the others; None takes a free port."""
        if self.guards is None:
            return port, "127.0.0.1"
        address = self.guards.facts[plan.hosts][0].address
        assert address is not None, "guards have looked"
        return port or await self.guards.free_port(plan.hosts), address

    async def require_seen(self, key: str, path: str) -> None:
        """Raises ConfigError if a host does not see what the controller sees."""
        if self.guards is not None:
            await self.guards.require_seen(key, path, writable=False)

    async def require_shared(self, key: str, folder: Path) -> None:
        """Raises ConfigError if a host does not see what the controller writes there."""
        if self.guards is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-") as token:
            await self.guards.require_seen(key, token.name, writable=True)


def gpus_of(plan: MeshPlan, facts: Sequence[HostFacts]) -> list[list[str]]:
    """What the plan's devices are called on each of its hosts, as CUDA_VISIBLE_DEVICES takes it.

    Example, where a scheduler leaves others on each host: devices 0, 1 -> 0, 1 and 4, 5.

    Raises:
        ConfigError: names the hosts that do not have them.
    """
    needed = max(plan.devices, default=-1) + 1
    seen = [fact.inventory.gpus for fact in facts]
    if any(len(gpus) < needed for gpus in seen):
        counts = [
            f"{plan.hosts}/{plan.first_host + number} ({fact.host}) {len(fact.inventory.gpus)}"
            for number, fact in enumerate(facts)
        ]
        raise ConfigError(
            f"launch.gpus_per_host: the {plan.role} is to have GPUs {plan.devices} of each host; "
            f"NVML and {DEVICES} show there: {', '.join(counts)}. Ask for fewer, or for hosts that "
            "have them"
        )
    return [[gpus[index].name for index in plan.devices] for gpus in seen]


def process_environment(plan: MeshPlan, launch: LaunchConfig) -> dict[str, str]:
    """What a process finds before Python starts: its GPUs alone, and how to reach others."""
    environment = {DEVICES: ",".join(plan.gpu_names), **plan.environment}
    if plan.device == "cuda":
        # In the order in which they were counted.
        environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        # Rows differ in length, and so do the tensors of one step and the next.
        given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        environment["PYTORCH_ALLOC_CONF"] = given or "expandable_segments:True"
    return environment | network_environment(launch)


def network_environment(launch: LaunchConfig) -> dict[str, str]:
    """The interface of torch's collectives."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    return {} if launch.interface is None else dict.fromkeys(names, launch.interface)


@contextlib.asynccontextmanager
async def running_hosts(launch: LaunchConfig, log_folder: Path | None) -> AsyncIterator[Hosts]:
    """The hosts, with a guard each; those that were started for the run end with it.

    Raises:
        ConfigError: they cannot be had, or not within `launch.start_timeout_s`.
    """
    if launch.kind == "local":
        yield Hosts(launch, {}, None)
        return
    async with contextlib.AsyncExitStack() as stack:
        silence = f"{launch.lost_host_s:g}s"
        # Unless told, Monarch waits for more than a minute. Hosts get these settings, too.
        stack.enter_context(
            configured(
                get_proc_state_max_idle=silence,
                get_actor_state_max_idle=silence,
                mesh_proc_spawn_max_idle=SPAWN_TIMEOUT,
                mesh_attach_config_timeout=f"{launch.start_timeout_s:g}s",
            )
        )
        meshes = await stack.enter_async_context(start_hosts(launch, log_folder))
        guards = await stack.enter_async_context(guarded(launch, meshes, log_folder))
        for role, facts in guards.facts.items():
            logger.info("hosts of the %s: %s", role, ", ".join(fact.host for fact in facts))
        yield Hosts(launch, meshes, guards)
