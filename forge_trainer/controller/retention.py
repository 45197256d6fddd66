"""Which versions stay in the store: the newest few, and older ones as long as they are read."""

from __future__ import annotations

import asyncio
import logging

from forge_trainer.config import WeightsConfig
from forge_trainer.pieces import WeightsVersion
from forge_trainer.protocols import WeightStore

logger = logging.getLogger(__name__)

LOOKS_PER_LEASE_TIMEOUT = 4


class Retention:
    """Drops what is older than the newest `keep_versions`, beside whatever else runs."""

    def __init__(self, store: WeightStore, config: WeightsConfig, store_timeout_s: float) -> None:
        self._store = store
        self._keep = config.keep_versions
        self._look_again_s = config.lease_timeout_s / LOOKS_PER_LEASE_TIMEOUT
        self._store_timeout_s = store_timeout_s
        self.held: list[WeightsVersion] = []
        """Versions that exist, oldest first."""
        self._leaving: list[WeightsVersion] = []
        """Older ones that are not gone yet, most of them hidden and still being read."""
        self._stuck: set[WeightsVersion] = set()
        """Those that could not be dropped, which is told once."""
        self._one_at_a_time = asyncio.Lock()
        self._dropping: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take over what earlier trainers left in the store."""
        self._leaving = await self._store.clean()
        self.held = await self._store.versions()
        self._look_again()

    def add(self, version: WeightsVersion) -> None:
        """A newer version exists, so an old one may go."""
        held = [*self.held, version]
        self._leaving += held[: -self._keep]
        self.held = held[-self._keep :]
        self._dropping = asyncio.create_task(self._drop_old(), name="drop weights")

    async def settle(self) -> None:
        """Return once all that could go has gone: what it frees is used again."""
        if self._dropping is not None:
            await asyncio.wait([self._dropping])

    async def _drop_old(self) -> None:
        await self._drop_left()
        self._look_again()

    def _look_again(self) -> None:
        if self._leaving and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._drop_later(), name="drop weights later")

    async def _drop_later(self) -> None:
        """What is being read goes once its readers are done or dead."""
        while self._leaving:
            await asyncio.sleep(self._look_again_s)
            await self._drop_left()

    async def _drop_left(self) -> None:
        async with self._one_at_a_time:
            for version in list(self._leaving):
                try:
                    async with asyncio.timeout(self._store_timeout_s):
                        has_gone = await self._store.drop(version)
                except Exception as error:
                    if version not in self._stuck:
                        logger.warning("could not drop old weights %s yet: %r", version, error)
                    self._stuck.add(version)
                    continue
                if has_gone:
                    self._leaving.remove(version)
                    self._stuck.discard(version)

    async def close(self) -> None:
        """Drop nothing any more."""
        await self.settle()
        async with self._one_at_a_time:
            if self._looking is not None:
                self._looking.cancel()
                await asyncio.wait([self._looking])
