"""How hosts are started: each kind of `launch` through Monarch's own job for it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, cast

from monarch._src.job.job import SSHJob
from monarch.actor import HostMesh, attach_to_workers
from monarch.config import configure, configured
from monarch.job import JobTrait, ProcessJob, SlurmJob

from forge_trainer.config import LaunchConfig, Role
from forge_trainer.errors import ConfigError, ForgeTrainerError
from forge_trainer.processes.meshes import closing

from .certificates import use_certificates

# Monarch's jobs write what they do to the console, past the log that was asked for.
logging.getLogger("monarch._src.job.job").setLevel(logging.WARNING)

HostMeshes = dict[Role, HostMesh]
Starter = Callable[[LaunchConfig, Path | None, contextlib.AsyncExitStack], HostMeshes]


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
            meshes = _STARTERS[launch.kind](launch, log_folder, stack)
            async with asyncio.timeout(launch.start_timeout_s):
                for mesh in meshes.values():
                    await mesh.initialized
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


def _processes(
    launch: LaunchConfig, log_folder: Path | None, stack: contextlib.AsyncExitStack
) -> HostMeshes:
    return _meshes_of(ProcessJob(dict(launch.hosts)), launch, stack)


def _slurm(
    launch: LaunchConfig, log_folder: Path | None, stack: contextlib.AsyncExitStack
) -> HostMeshes:
    job = slurm_job(launch, log_folder)
    listen_at(launch)
    return _meshes_of(job, launch, stack)


def slurm_job(launch: LaunchConfig, log_folder: Path | None) -> SlurmJob:
    """One job for all hosts; not submitted yet."""
    slurm = launch.slurm
    return SlurmJob(
        dict(launch.hosts),
        python_exe=launch.python or sys.executable,
        slurm_args=slurm.arguments,
        monarch_port=launch.port,
        job_name=slurm.job_name,
        time_limit=slurm.time_limit,
        partition=slurm.partition,
        log_dir=str(log_folder) if log_folder else None,
        exclusive=slurm.exclusive,
        gpus_per_node=launch.gpus_per_host or None,
        cpus_per_task=slurm.cpus_per_task,
        mem=slurm.mem,
        job_start_timeout=int(launch.start_timeout_s),
        account=slurm.account,
        qos=slurm.qos,
        bind_to=str(launch.bind) if launch.bind else None,
    )


def _ssh(
    launch: LaunchConfig, log_folder: Path | None, stack: contextlib.AsyncExitStack
) -> HostMeshes:
    job = SSHJob(python_exe=launch.python or sys.executable, monarch_port=launch.port)
    listen_at(launch)
    for role, places in launch.addresses.items():
        job.add_mesh(role, places)
    meshes = _meshes_of(job, launch, stack)
    for mesh in meshes.values():
        # The job itself only ends the local ssh, and leaves the workers.
        stack.push_async_callback(closing, "hosts", mesh.shutdown)
    return meshes


def _kubernetes(
    launch: LaunchConfig, log_folder: Path | None, stack: contextlib.AsyncExitStack
) -> HostMeshes:
    run = secrets.token_hex(3)
    job = kubernetes_job(launch, run)
    listen_at(launch)
    return _meshes_of(job, launch, stack, name_end=run)


def kubernetes_job(launch: LaunchConfig, run: str, **options: Any) -> Any:
    """A MonarchMesh of pods per role; not created yet. `options` are of Monarch's KubernetesJob.

    `run` ends the names of meshes: one of the same name would be taken over from another run.

    Raises:
        ConfigError: the package `kubernetes` is not installed.
    """
    try:
        from monarch._src.job.kubernetes import ImageSpec, KubernetesJob
    except RuntimeError as error:
        raise ConfigError(
            "launch.kind: kubernetes needs a package; install it with `uv sync --extra kubernetes`"
        ) from error
    pods = launch.kubernetes
    assert pods is not None, "LaunchConfig has looked"
    job = KubernetesJob(pods.namespace, timeout=int(launch.start_timeout_s), **options)
    for role, number in launch.hosts.items():
        image = ImageSpec(pods.image, dict(pods.resources))
        name = f"{role}{run}"
        job.add_mesh(name, number, image_spec=image, labels=dict(pods.labels) or None)
    return job


def _waiting_workers(
    launch: LaunchConfig, log_folder: Path | None, stack: contextlib.AsyncExitStack
) -> HostMeshes:
    """Workers that somebody else has started; they stay when the run ends."""
    use_certificates(launch.tls)
    listen_at(launch, scheme="tcp" if launch.tls is None else "tls")
    meshes = {
        role: attach_to_workers(ca="trust_all_connections", workers=places, name=role)
        for role, places in launch.addresses.items()
    }
    for mesh in meshes.values():
        # Ends what runs on them.
        stack.push_async_callback(closing, "hosts", mesh.stop)
    return meshes


def _meshes_of(
    job: JobTrait, launch: LaunchConfig, stack: contextlib.AsyncExitStack, *, name_end: str = ""
) -> HostMeshes:
    stack.callback(job.kill)
    state = job.state(cached_path=None)
    return {role: cast(HostMesh, getattr(state, role + name_end)) for role in launch.num_hosts}


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
            f"launch.controller_address: {name} has no address: {error.strerror}"
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
