"""The guards of a run's hosts, seen from the controller: they are asked, and told that it lives."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from monarch.actor import HostMesh, ProcMesh

from forge_trainer.actors.guard import HostFacts, HostGuard, become_guard
from forge_trainer.actors.trainer import RANKS
from forge_trainer.config import LaunchConfig, Role
from forge_trainer.errors import ConfigError
from forge_trainer.processes.meshes import (
    HOST_STOP_TIMEOUT_S,
    Place,
    closing,
    start_command,
)

from .inventory import this_machine

logger = logging.getLogger(__name__)

BEATS_PER_TIMEOUT = 9


class HostGuards:
    """A guard on every host; `facts` by role, in the order of its hosts."""

    def __init__(self, guards: Mapping[Role, Any], facts: Mapping[Role, list[HostFacts]]) -> None:
        self._guards = guards
        self.facts = facts

    async def require_seen(self, key: str, path: str, *, writable: bool) -> None:
        """Every host sees a path that the controller sees.

        Raises:
            ConfigError: names the hosts that do not.
        """
        blind = [
            f"{role}/{number} ({self.facts[role][number].host})"
            for role, guards in self._guards.items()
            for number, sees in enumerate((await guards.sees.call(path, writable)).values())
            if not sees
        ]
        if blind:
            raise ConfigError(
                f"{key}: {Path(path).parent} is not the same on {', '.join(blind)}: what is there "
                "for the controller is not there; give a folder that all hosts share"
            )

    async def free_port(self, role: Role) -> int:
        """A port that nobody has on the first host of the role, a moment ago."""
        first = self._guards[role].slice(hosts=0, **{RANKS: 0})
        return int(await first.free_port.call_one())

    async def beat(self, every_s: float) -> None:
        """Tell all hosts that the controller lives, for ever."""
        # Side by side: who is silent must not keep the others from hearing.
        await asyncio.gather(
            *(self._beat(role, guards, every_s) for role, guards in self._guards.items())
        )

    async def _beat(self, role: Role, guards: Any, every_s: float) -> None:
        was_told = False
        while True:
            try:
                await asyncio.wait_for(guards.beat.call(), every_s)
            except Exception as error:
                # Whoever needs that host finds out, too, and says what was lost.
                if not was_told:
                    logger.warning("a host of the %s does not answer: %r", role, error)
                was_told = True
            await asyncio.sleep(every_s)


@contextlib.asynccontextmanager
async def guarded(
    launch: LaunchConfig, hosts: Mapping[Role, HostMesh], log_folder: Path | None = None
) -> AsyncIterator[HostGuards]:
    """Guards on all hosts.

    Raises:
        ConfigError: a host's name leads to itself alone, or it has no such interface.
    """
    processes: dict[Role, ProcMesh] = {}
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(_stop, processes)
        guards: dict[Role, Any] = {}
        for role, mesh in hosts.items():
            # They are to see what the host has been given; nothing there opens a GPU.
            place = Place(mesh, role, python=launch.python)
            processes[role] = mesh.spawn_procs(
                per_host={RANKS: 1},
                bootstrap=functools.partial(become_guard, log_folder, role),
                bootstrap_command=functools.partial(start_command, place),
                name=f"{role}_guard",
            )
            guards[role] = processes[role].spawn(
                "guard",
                HostGuard,
                launch.orphan_timeout_s,
                this_machine,
                keeps_host=launch.kind == "hosts",
            )
        facts = {role: await _look(role, one, launch) for role, one in guards.items()}
        for role, of_hosts in facts.items():
            for number, host in enumerate(of_hosts):
                require_address(launch, f"{role}/{number}", host)
        found = HostGuards(guards, facts)
        beating = asyncio.create_task(found.beat(launch.orphan_timeout_s / BEATS_PER_TIMEOUT))
        try:
            yield found
        finally:
            beating.cancel()


async def _stop(guards: Mapping[Role, ProcMesh]) -> None:
    # Side by side, for those on a lost host are waited for.
    await asyncio.gather(
        *(
            closing(f"{role} guards", mesh.stop, timeout_s=HOST_STOP_TIMEOUT_S)
            for role, mesh in guards.items()
        )
    )


async def _look(role: Role, guards: Any, launch: LaunchConfig) -> list[HostFacts]:
    try:
        return list((await guards.look.call(launch.interface)).values())
    except Exception as error:
        raise ConfigError(
            f"launch: the hosts of the {role} start no processes; is "
            f"{launch.python or sys.executable} there, with this project in it (launch.python)? "
            f"{str(error).strip().splitlines()[-1]}"
        ) from error


def require_address(launch: LaunchConfig, name: str, host: HostFacts) -> None:
    """Ranks on other machines connect to it.

    Raises:
        ConfigError: it has no address, or one that only it can reach.
    """
    if host.address is None:
        raise ConfigError(
            f"launch.interface: host {name} ({host.host}) has no IPv4 address on "
            f"{launch.interface or 'its name'}"
        )
    others = launch.kind != "processes" and sum(launch.num_hosts.values()) > 1
    is_asked_for = launch.interface is not None
    if others and not is_asked_for and ipaddress.ip_address(host.address).is_loopback:
        raise ConfigError(
            f"host {name} calls itself {host.host}, which is {host.address} there, where no other "
            "machine reaches it; correct its /etc/hosts, or give launch.interface"
        )
