"""How hosts are started: each kind of `launch` through Monarch's own job for it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import cast

from monarch.actor import HostMesh, attach_to_workers
from monarch.config import configure, configured
from monarch.job import JobTrait, ProcessJob, SlurmJob

from forge_trainer.config import LaunchConfig, Role
from forge_trainer.errors import ConfigError, ForgeTrainerError
from forge_trainer.processes.meshes import HOST_STOP_TIMEOUT_S, closing
from forge_trainer.tasks import left_behind, run_with_background

from .certificates import use_certificates
from .pods import kubernetes_job
from .ssh import WatchedSshJob

# Monarch's jobs write what they do to the console, past the log that was asked for.
logging.getLogger("monarch._src.job.job").setLevel(logging.WARNING)

logger = logging.getLogger(__name__)

HostMeshes = dict[Role, HostMesh]
Starter = Callable[[LaunchConfig, Path | None, contextlib.AsyncExitStack], Awaitable[HostMeshes]]


@contextlib.asynccontextmanager
async def start_hosts(launch: LaunchConfig, log_folder: Path | None) -> AsyncIterator[HostMeshes]:
    """Meshes of hosts that answer. What is started here is ended at the end.

    Schedulers write what hosts print to `log_folder`.

    Raises:
        ConfigError: they cannot be had, or not within `launch.start_timeout_s`.
    """
    async with contextlib.AsyncExitStack() as stack:
        # Whatever is chosen for these hosts is not for what comes after them.
        stack.enter_context(configured())
        try:
            meshes = await _STARTERS[launch.kind](launch, log_folder, stack)
        except ForgeTrainerError:
            raise
        except TimeoutError as error:
            raise ConfigError(
                "launch: the hosts did not answer within start_timeout_s="
                f"{launch.start_timeout_s}; do their names lead to addresses that this machine "
                "reaches, and this one's (launch.controller_address) to one that they reach?"
            ) from error
        except Exception as error:
            raise ConfigError(f"launch: no hosts by kind: {launch.kind}: {error}") from error
        yield meshes


async def _processes(
    launch: LaunchConfig, log_folder: Path | None, stack: contextlib.AsyncExitStack
) -> HostMeshes:
    meshes = await _meshes_of(ProcessJob(dict(launch.hosts)), launch, stack)
    await _attached(meshes, launch)
    return meshes


async def _slurm(
    launch: LaunchConfig, log_folder: Path | None, stack: contextlib.AsyncExitStack
) -> HostMeshes:
    job = slurm_job(launch, log_folder)
    listen_at(launch)
    meshes = await _meshes_of(job, launch, stack)
    await _attached(meshes, launch)
    return meshes


def slurm_job(launch: LaunchConfig, log_folder: Path | None) -> SlurmJob:
    """One job for all hosts; not submitted yet."""
    slurm = launch.slurm
    gpus = launch.gpus_per_host or None
    arguments = list(slurm.arguments)
    if gpus and slurm.partition and not slurm.exclusive:
        # Given gpus_per_node, SlurmJob of Monarch 0.7.0 would ask the package clusterscope for
        # cores and memory, and write the script without them.
        arguments.append(f"--gpus-per-node={gpus}")
        gpus = None
    return SlurmJob(
        dict(launch.hosts),
        python_exe=launch.python or sys.executable,
        slurm_args=arguments,
        monarch_port=launch.port,
        job_name=slurm.job_name,
        time_limit=slurm.time_limit,
        partition=slurm.partition,
        log_dir=str(log_folder) if log_folder else None,
        exclusive=slurm.exclusive,
        gpus_per_node=gpus,
        cpus_per_task=slurm.cpus_per_task,
        mem=slurm.mem,
        job_start_timeout=int(launch.start_timeout_s),
        account=slurm.account,
        qos=slurm.qos,
        bind_to=str(launch.bind) if launch.bind else None,
    )


async def _ssh(
    launch: LaunchConfig, log_folder: Path | None, stack: contextlib.AsyncExitStack
) -> HostMeshes:
    job = WatchedSshJob(launch.python or sys.executable, launch.port, log_folder)
    listen_at(launch)
    for role, places in launch.addresses.items():
        job.add_mesh(role, places)
    meshes = await _meshes_of(job, launch, stack)
    await run_with_background(_attached(meshes, launch), job.watch())
    job.keep_workers()
    stack.push_async_callback(_closing_all, [mesh.shutdown for mesh in meshes.values()])
    return meshes


async def _kubernetes(
    launch: LaunchConfig, log_folder: Path | None, stack: contextlib.AsyncExitStack
) -> HostMeshes:
    run = secrets.token_hex(3)
    job = kubernetes_job(launch, run)
    listen_at(launch)
    meshes = await _meshes_of(job, launch, stack, name_end=run)
    await _attached(meshes, launch)
    return meshes


async def _waiting_workers(
    launch: LaunchConfig, log_folder: Path | None, stack: contextlib.AsyncExitStack
) -> HostMeshes:
    """Workers that somebody else has started; they stay when the run ends."""
    use_certificates(launch.tls)
    listen_at(launch, scheme="tcp" if launch.tls is None else "tls")
    meshes = {
        role: attach_to_workers(ca="trust_all_connections", workers=places, name=role)
        for role, places in launch.addresses.items()
    }
    await _attached(meshes, launch)
    # Ends what runs on them.
    stack.push_async_callback(_closing_all, [mesh.stop for mesh in meshes.values()])
    return meshes


async def _meshes_of(
    job: JobTrait, launch: LaunchConfig, stack: contextlib.AsyncExitStack, *, name_end: str = ""
) -> HostMeshes:
    """Hosts of a job, once it has them, which takes as long as a queue is; not attached to yet."""
    stack.callback(_end, job)
    try:
        # Not cut short: who does not know the number of a job cannot take it back.
        job.apply()
    except BaseException:
        # Monarch 0.7.0 takes a job that was begun and not finished for none at all.
        with contextlib.suppress(Exception):
            job._kill()
        raise
    state = await left_behind(lambda: job.state(cached_path=None))
    return {role: cast(HostMesh, getattr(state, role + name_end)) for role in launch.num_hosts}


async def _closing_all(closes: Iterable[Callable[[], Awaitable[object]]]) -> None:
    # Side by side, for a host that is lost is waited for.
    await asyncio.gather(
        *(closing("hosts", close, timeout_s=HOST_STOP_TIMEOUT_S) for close in closes)
    )


def _end(job: JobTrait) -> None:
    try:
        job.kill()
    except Exception as error:
        logger.warning("ending the hosts failed, and they may still be there: %r", error)


async def _attached(meshes: HostMeshes, launch: LaunchConfig) -> None:
    """Raises TimeoutError if a host does not answer."""
    async with asyncio.timeout(launch.start_timeout_s):
        for mesh in meshes.values():
            await mesh.initialized


def listen_at(launch: LaunchConfig, *, scheme: str = "tcp") -> None:
    """The one address at which the hosts reach this process, never all interfaces.

    Raises:
        ConfigError: this machine's name leads to itself alone.
    """
    name = launch.controller_address or socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(
            f"launch.controller_address: {name} has no IPv4 address: {error.strerror}"
        ) from error
    if launch.controller_address is None and ipaddress.ip_address(address).is_loopback:
        raise ConfigError(
            f"launch.controller_address: this machine calls itself {name}, which is {address} "
            "here, where no other machine reaches it; give the name or address that hosts can use"
        )
    if ipaddress.ip_address(address).is_unspecified:
        raise ConfigError(f"launch.controller_address: {name} is no address of this machine alone")
    # A certificate is for a name; without one, the address needs no look-up by others.
    configure(default_transport=f"{scheme}://{name if scheme == 'tls' else address}:0")


_STARTERS: Mapping[str, Starter] = {
    "processes": _processes,
    "hosts": _waiting_workers,
    "ssh": _ssh,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
}
