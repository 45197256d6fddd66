"""HostGuard: one small process per host of a run, that knows its host and outlives nobody.

Imports no torch: it is to be there within a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from monarch.actor import Actor, concurrent_endpoint, current_rank

from forge_trainer.types import HostInventory

logger = logging.getLogger(__name__)

LOOKS_PER_TIMEOUT = 20


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What a host of a run says of itself."""

    host: str
    address: str | None
    """IPv4 of its name, or of the interface that was asked for."""
    inventory: HostInventory = field(default_factory=HostInventory)
    """What it has for the processes that start there."""


def become_guard(log_folder: Path | None, role: str) -> None:
    """Runs in a new process before the actor is made in it."""
    if log_folder is not None:
        path = log_folder / f"{role}-guard-{current_rank().rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(filename=path, format="%(asctime)s %(levelname)s %(message)s")
    # A process group of its own: Ctrl-C goes to the controller, which closes the others in order.
    os.setpgid(0, 0)


class HostGuard(Actor):
    """Ends its host's processes when the controller has been silent for too long.

    Monarch leaves hosts and what runs on them alive when a controller dies without closing them.
    """

    def __init__(
        self, timeout_s: float, take_stock: Callable[[], HostInventory], *, keeps_host: bool
    ) -> None:
        """With `keeps_host`, the host itself stays, for somebody else has started it."""
        self._timeout_s = timeout_s
        self._take_stock = take_stock
        self._keeps_host = keeps_host
        self._heard = time.monotonic()
        self._host_pid = os.getppid()
        threading.Thread(target=self._watch, name="guard", daemon=True).start()

    @concurrent_endpoint
    async def look(self, interface: str | None) -> HostFacts:
        """What the host says of itself; with an interface, its address there."""
        self._heard = time.monotonic()
        return HostFacts(socket.gethostname(), _address(interface), self._take_stock())

    @concurrent_endpoint
    async def beat(self) -> None:
        """The controller lives."""
        self._heard = time.monotonic()

    @concurrent_endpoint
    async def free_port(self) -> int:
        """A port that nobody had a moment ago."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    @concurrent_endpoint
    async def sees(self, path: str, writable: bool) -> bool:
        """True if that file or folder is there for this host's processes."""
        return os.access(path, os.R_OK | (os.W_OK if writable else 0))

    def _watch(self) -> None:
        while time.monotonic() - self._heard < self._timeout_s:
            time.sleep(self._timeout_s / LOOKS_PER_TIMEOUT)
        logger.error(
            "nothing heard of the controller for %.0f s; this host's processes end", self._timeout_s
        )
        end_host(self._host_pid, keep=self._keeps_host)


def end_host(pid: int, *, keep: bool) -> None:
    """End all processes that a host, this one's parent, has started; and, unless `keep`, itself.

    Without their host, its processes get a signal from the system.
    """
    host = psutil.Process(pid)
    if not keep:
        host.send_signal(signal.SIGTERM)
        # One that is stopped would not hear it.
        with contextlib.suppress(psutil.TimeoutExpired):
            host.wait(timeout=2)
            return
        host.kill()
    for process in host.children() if keep else ():
        if process.pid != os.getpid():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    os._exit(1)


def _address(interface: str | None) -> str | None:
    """IPv4; of the host's name where no interface is given. None if there is none."""
    if interface is not None:
        found = psutil.net_if_addrs().get(interface, [])
        return next((a.address for a in found if a.family == socket.AF_INET), None)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None
