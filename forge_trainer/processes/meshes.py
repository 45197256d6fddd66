"""Process meshes: what runs where, and what every process does first.

The only file that sets environment variables or touches Monarch's global hooks.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import monarch.actor
from monarch._src.actor.host_mesh import BootstrapCommand, default_bootstrap_cmd
from monarch.actor import HostMesh, ProcMesh, current_rank, this_host
from monarch.spmd import setup_torch_elastic_env_async

from forge_trainer.actors.trainer import RANKS

from . import torchstore_patch
from .rank_logs import RankLogs, set_up_logging

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 40.0
"""Monarch stops processes only once they have started, which can take half of this."""
HOST_STOP_TIMEOUT_S = 5.0
"""The same on hosts, of which one may be lost; those that were started for a run end with it."""
MAX_MESSAGE_BYTES = 910_737_418_240
"""What torchstore 0.1.2 sets itself for its transfers, with a warning, where it finds nothing."""


def prepare_controller() -> None:
    """Make this process fit to drive meshes: patched torchstore, and faults as exceptions.

    By default Monarch interrupts the controller when a process dies (exit code 130, as if the
    user had pressed Ctrl-C). Here the call that needed the process raises instead.
    """
    _prepare_torchstore()
    monarch.actor.unhandled_fault_hook = _log_fault


def _log_fault(failure: Any) -> None:
    # Must not raise: Monarch answers an error in here by interrupting the controller.
    logger.debug("%s", failure)


@dataclass(frozen=True, slots=True)
class Place:
    """Hosts for processes, and what these find in their environment."""

    hosts: HostMesh | None = None
    """None is this machine."""
    name: str = "local"
    """Of the hosts; a process finds its own as HOST_VARIABLE, such as trainer/1."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """There before Python starts, so also before CUDA does."""
    python: str | None = None
    """The interpreter; None is the controller's own path."""
    first_host: int = 0
    """What the first of these hosts is called in the mesh called `name`."""


HOST_VARIABLE = "FORGE_TRAINER_HOST"
THIS_MACHINE = Place()


def spawn_mesh(
    name: str,
    *,
    num_processes: int,
    cpu_threads: int,
    logs: RankLogs | None = None,
    place: Place = THIS_MACHINE,
    first_rank: int = 0,
) -> ProcMesh:
    """So many processes on every host, along the axis `ranks`; not waited for.

    In their logs, they are counted from `first_rank`.
    """
    return (place.hosts or this_host()).spawn_procs(
        per_host={RANKS: num_processes},
        bootstrap=functools.partial(
            _bootstrap,
            name,
            cpu_threads,
            logs,
            first_rank=first_rank,
            takes_output=place.hosts is not None,
        ),
        bootstrap_command=functools.partial(start_command, place),
        name=name,
    )


def start_command(place: Place, point: Any) -> BootstrapCommand:
    """What starts the process at this point of a mesh."""
    command = default_bootstrap_cmd()
    host = place.name
    if "hosts" in point:
        host = f"{place.name}/{place.first_host + point['hosts']}"
    return BootstrapCommand(
        place.python or command.program,
        None,
        command.args,
        {**command.env, **place.environment, HOST_VARIABLE: host},
    )


def _bootstrap(
    mesh: str, cpu_threads: int, logs: RankLogs | None, *, first_rank: int, takes_output: bool
) -> None:
    """Runs in a new process before any actor is made in it."""
    rank = first_rank + current_rank().rank
    set_up_logging(logs, mesh=mesh, rank=rank, takes_output=takes_output)
    # A process group of its own: Ctrl-C goes to the controller, which closes the others in order.
    os.setpgid(0, 0)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logger.info(
        "process %d on host %s, GPUs %r, %d threads, %s",
        os.getpid(),
        os.environ[HOST_VARIABLE],
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        cpu_threads,
        sys.executable,
    )
    import torch

    torch.set_num_threads(cpu_threads)
    # Imported before actors are: two actors unpickled at once would import it half each.
    _prepare_torchstore()


def _prepare_torchstore() -> None:
    os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(MAX_MESSAGE_BYTES))
    torchstore_patch.apply()


def points_of(mesh: ProcMesh) -> list[dict[str, int]]:
    """Where every process is, in the order of ranks: host by host."""
    sizes = mesh.sizes
    indices = itertools.product(*(range(size) for size in sizes.values()))
    return [dict(zip(sizes, index, strict=True)) for index in indices]


async def start_store(mesh: ProcMesh, name: str) -> None:
    """Make the mesh's processes, one per host, the volumes of a torchstore called `name`.

    Raises:
        ActorError: two of them are on one host.
    """
    import cloudpickle
    import torchstore

    from forge_trainer.weights.torchstore import hosts

    # Clients of the store need not have this package.
    cloudpickle.register_pickle_by_value(hosts)
    await torchstore.initialize(
        math.prod(mesh.sizes.values()), strategy=hosts.VolumePerHost(), store_name=name, mesh=mesh
    )


async def stop_store(name: str) -> None:
    """Forget the store; its process is stopped with its mesh."""
    import torchstore

    await torchstore.shutdown(name)


async def join_ranks(
    mesh: ProcMesh, master_port: int | None, master_address: str = "127.0.0.1"
) -> None:
    """Tell every process its rank and where rank 0 listens, as torchrun would.

    Without a port, rank 0's host takes a free one, and listens where its name leads to.
    """
    if master_port is None:
        await setup_torch_elastic_env_async(mesh)
    else:
        await setup_torch_elastic_env_async(
            mesh, master_addr=master_address, master_port=master_port
        )


@contextlib.asynccontextmanager
async def running_mesh(
    name: str,
    *,
    num_processes: int,
    cpu_threads: int,
    logs: RankLogs | None = None,
    place: Place = THIS_MACHINE,
    first_rank: int = 0,
) -> AsyncIterator[ProcMesh]:
    """As `spawn_mesh`; the processes are stopped at the end, whatever happens."""
    mesh = spawn_mesh(
        name,
        num_processes=num_processes,
        cpu_threads=cpu_threads,
        logs=logs,
        place=place,
        first_rank=first_rank,
    )
    try:
        yield mesh
    finally:
        timeout_s = STOP_TIMEOUT_S if place.hosts is None else HOST_STOP_TIMEOUT_S
        await closing(f"{name} processes", lambda: mesh.stop("closed"), timeout_s=timeout_s)


async def closing(
    what: str, close: Callable[[], Awaitable[object]], *, timeout_s: float = STOP_TIMEOUT_S
) -> None:
    """Close one thing; a failure is logged, since the rest must be closed as well."""
    try:
        async with asyncio.timeout(timeout_s):
            await close()
    except Exception as error:
        logger.warning("closing the %s failed: %r", what, error)
