"""The weight store of a run: chosen once all processes are there, replaced if it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from forge_trainer.config import WeightsConfig
from forge_trainer.errors import ConfigError, WeightsError
from forge_trainer.pieces import StoreAddress
from forge_trainer.protocols import WeightStore
from forge_trainer.weights.shared_memory.folder import LOCK, shared_folder
from forge_trainer.weights.stores import open_store

from .meshes import THIS_MACHINE, Place, closing, running_mesh, start_store, stop_store

logger = logging.getLogger(__name__)

STORE_NAME = "forge_trainer"
IN_MEMORY = StoreAddress("memory", "")
"""For a trainer that publishes nothing."""


class StoreMember(Protocol):
    """Processes that publish or pull."""

    async def can_reach(self, token: str) -> bool:
        """True if all of them see that file."""
        ...

    async def open_store(self, address: StoreAddress) -> None: ...


class RunStore:
    """Opens the run's store in all processes that publish or pull."""

    def __init__(
        self,
        config: WeightsConfig,
        stack: contextlib.AsyncExitStack,
        place: Place = THIS_MACHINE,
    ) -> None:
        """Whatever is started is closed with `stack`. `place` is where the trainer is: each of its
        hosts gets a volume of torchstore.

        Raises:
            ConfigError: shared memory is asked for and cannot be had.
        """
        self._config = config
        self._stack = stack
        self._members: Sequence[StoreMember] = ()
        self._folder: Path | None = None
        self.address = IN_MEMORY
        """Where it is, once it is open."""
        self._place = place
        # Other hosts share no memory with this one, where its folder would be.
        if config.transport != "torchstore" and place.hosts is None:
            root = config.shared_memory_folder
            try:
                self._folder = stack.enter_context(shared_folder(Path(root) if root else None))
            except (ConfigError, WeightsError) as error:
                if config.transport == "shared_memory" or root:
                    raise
                logger.warning("weights.transport auto: %s", error)

    async def open(self, members: Sequence[StoreMember]) -> WeightStore:
        """Choose the transport and open the store in all members, and here.

        Raises:
            ConfigError: shared memory is asked for, and not all members see it.
        """
        self._members = members
        return await self._open_everywhere(await self._choose())

    async def _choose(self) -> StoreAddress:
        if self._folder is not None:
            token = str(self._folder / LOCK)
            if all(await asyncio.gather(*(one.can_reach(token) for one in self._members))):
                return StoreAddress("shared_memory", str(self._folder))
            if self._config.transport == "shared_memory":
                raise ConfigError(
                    f"weights.transport: shared_memory, but not all processes see {self._folder}: "
                    "trainer and generator must run on one host; use torchstore"
                )
            logger.info("weights.transport auto: not all processes see %s", self._folder)
        return await self._start_torchstore()

    async def _start_torchstore(self) -> StoreAddress:
        name = f"{STORE_NAME}_{secrets.token_hex(4)}"
        mesh = await self._stack.enter_async_context(
            running_mesh("store", num_processes=1, cpu_threads=1, place=self._place)
        )
        await start_store(mesh, name)
        self._stack.push_async_callback(closing, "store", lambda: stop_store(name))
        return StoreAddress("torchstore", name)

    async def restart(self) -> WeightStore:
        """A new, empty torchstore in place of one whose process is gone.

        Raises:
            ConfigError: the weights are in shared memory, which has no process.
        """
        if self.address.transport == "shared_memory":
            raise ConfigError("weights travel through shared memory: no process can be restarted")
        return await self._open_everywhere(await self._start_torchstore())

    async def _open_everywhere(self, address: StoreAddress) -> WeightStore:
        self.address = address
        await asyncio.gather(*(member.open_store(address) for member in self._members))
        store = open_store(address, self._config)
        self._stack.callback(store.close)
        logger.info("weights travel through %s (%s)", address.transport, address.location)
        return store
