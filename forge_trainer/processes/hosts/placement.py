"""Who gets which processes, hosts, GPUs and threads. Decided before anything is started."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge_trainer.config import (
    GeneratorConfig,
    LaunchConfig,
    PlacementConfig,
    Role,
    TrainerConfig,
)
from forge_trainer.errors import ConfigError
from forge_trainer.hf import resolve_device
from forge_trainer.types import HostInventory


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """The processes of one mesh."""

    role: Role
    hosts: Role
    """The mesh whose hosts it is on: its own role, or the trainer."""
    num_hosts: int
    per_host: int
    device: str
    """`cpu` or `cuda`"""
    devices: tuple[int, ...]
    """Indices into each host's GPUs, one for every process there; none on the CPU."""
    gpu_names: tuple[str, ...]
    """The same, as CUDA_VISIBLE_DEVICES takes them."""
    cpu_threads: int
    """Of each process."""
    runs_vllm: bool = False
    """Which wants to find things in its environment."""

    @property
    def num_processes(self) -> int:
        return self.num_hosts * self.per_host


Placement = Mapping[Role, MeshPlan]


def plan_placement(
    trainers: Mapping[Role, TrainerConfig],
    generator: GeneratorConfig,
    placement: PlacementConfig,
    launch: LaunchConfig,
    inventory: HostInventory,
) -> Placement:
    """A plan for every mesh.

    Raises:
        ConfigError: with a table of what was asked and what is there.
    """
    configs: dict[Role, TrainerConfig | GeneratorConfig] = {**trainers, "generator": generator}
    _refuse_what_is_not_started(placement, launch, configs)
    wanted = {role: _processes(role, config, launch) for role, config in configs.items()}
    num_gpus = len(inventory.gpus)
    kinds = {role: resolve_device(config.device, num_gpus).type for role, config in configs.items()}
    devices = {}
    for host in {launch.mesh_of(role) for role in configs}:
        on_gpus = {
            role: per_host
            for role, (_, per_host) in wanted.items()
            if launch.mesh_of(role) == host and kinds[role] == "cuda"
        }
        devices.update(_deal(on_gpus, placement, num_gpus, host))
    return {
        role: MeshPlan(
            role=role,
            hosts=launch.mesh_of(role),
            num_hosts=num_hosts,
            per_host=per_host,
            device=kinds[role],
            devices=devices.get(role, ()),
            gpu_names=tuple(inventory.gpus[i].name for i in devices.get(role, ())),
            cpu_threads=configs[role].cpu_threads
            or _fair_share(inventory, _on_same_hosts(role, wanted, launch)),
            runs_vllm=_runs_vllm(configs[role]),
        )
        for role, (num_hosts, per_host) in wanted.items()
    }


def _runs_vllm(config: TrainerConfig | GeneratorConfig) -> bool:
    return isinstance(config, GeneratorConfig) and config.backend == "vllm"


def _refuse_what_is_not_started(
    placement: PlacementConfig, launch: LaunchConfig, roles: Mapping[Role, object]
) -> None:
    named = {
        "placement.devices": placement.devices,
        "placement.colocate": placement.colocate,
        "launch.hosts": launch.hosts,
        "launch.addresses": launch.addresses,
    }
    for key, given in named.items():
        for role in given:
            if role not in roles:
                raise ConfigError(f"{key}: {role} is named, but this run starts none; leave it out")


def _processes(
    role: Role, config: TrainerConfig | GeneratorConfig, launch: LaunchConfig
) -> tuple[int, int]:
    """(hosts, processes on each)"""
    hosts = launch.num_hosts[launch.mesh_of(role)]
    if isinstance(config, GeneratorConfig):
        if role in launch.num_hosts and hosts > 1:
            raise ConfigError(
                f"launch: {hosts} hosts for the generator, which is one process; give it one"
            )
        return 1, 1
    if config.num_ranks % hosts:
        raise ConfigError(
            f"{role}.num_ranks: {config.num_ranks} ranks cannot be shared equally by {hosts} "
            "hosts (launch)"
        )
    return hosts, config.num_ranks // hosts


def _deal(
    wanted: Mapping[Role, int], placement: PlacementConfig, available: int, host: Role
) -> dict[Role, tuple[int, ...]]:
    """GPUs of each host for the meshes there, in order; those that are colocated share."""
    named = {role: placement.devices[role] for role in wanted if role in placement.devices}
    _refuse_overlap(named, placement)
    dealt: dict[Role, tuple[int, ...]] = {}
    taken = {i for devices in named.values() for i in devices}
    shared = sorted({i for role in named if role in placement.colocate for i in named[role]})
    for role, number in wanted.items():
        if role in placement.devices:
            given = tuple(placement.devices[role])
        else:
            free = [i for i in range(available) if i not in taken]
            mine = shared + free if role in placement.colocate else free
            given = tuple(mine[:number])
        dealt[role] = given
        taken.update(given)
        if role in placement.colocate:
            shared += [i for i in given if i not in shared]
    too_few = any(len(dealt[role]) != number for role, number in wanted.items())
    if too_few or any(i >= available for given in dealt.values() for i in given):
        raise ConfigError(_table(wanted, dealt, available, host))
    return dealt


def _refuse_overlap(named: Mapping[Role, Sequence[int]], placement: PlacementConfig) -> None:
    for one, other in itertools.combinations(named, 2):
        both = sorted(set(named[one]) & set(named[other]))
        if both and not {one, other} <= set(placement.colocate):
            raise ConfigError(
                f"placement.devices: {one} and {other} both have {both}; give others, or write "
                f"colocate: [{one}, {other}] if they shall share them"
            )


def _table(
    wanted: Mapping[Role, int],
    dealt: Mapping[Role, Sequence[int]],
    available: int,
    host: Role,
) -> str:
    lines = [
        f"placement: GPUs on each host of the {host} do not fit: {available} there. Asked for:",
        f"    {'mesh':<10} {'processes per host':<20} GPUs",
        *(
            f"    {role:<10} {number:<20} {', '.join(map(str, dealt[role])) or 'none'}"
            for role, number in wanted.items()
        ),
        "    Every process needs one GPU. Lower num_ranks, correct placement.devices, let meshes "
        "share with placement.colocate, or set device: cpu",
    ]
    return "\n".join(lines)


def _on_same_hosts(role: Role, wanted: Mapping[Role, tuple[int, int]], launch: LaunchConfig) -> int:
    """Processes on a host of this role; those of all roles that are there."""
    here = launch.mesh_of(role)
    return sum(n for other, (_, n) in wanted.items() if launch.mesh_of(other) == here)


def _fair_share(inventory: HostInventory, processes: int) -> int:
    return max(1, (inventory.cores or 1) // processes)


def describe(plan: MeshPlan) -> str:
    """One line for people, e.g. "trainer: 4 processes on 1 host, GPUs 0, 1, 2, 3"."""
    where = "1 host" if plan.num_hosts == 1 else f"{plan.num_hosts} hosts"
    with_what = (
        f"GPUs {', '.join(map(str, plan.devices))}"
        if plan.devices
        else f"CPU, {plan.cpu_threads} threads each"
    )
    return f"{plan.role}: {plan.num_processes} processes on {where}, {with_what}"
