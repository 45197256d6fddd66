"""Leases as keys in torchstore, without a lock and without a shared clock.

The reader writes its lease, then reads the manifest, and writes a new key as a sign of life every
now and then. The dropper deletes the manifest, then lists leases, then deletes data. A lease is
dead when the dropper's own clock saw no new sign for `timeout_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from forge_trainer.pieces import WeightsVersion
from forge_trainer.weights.keys import LEASES, lease_key, leases_prefix, version_of

logger = logging.getLogger(__name__)

BEATS_PER_TIMEOUT = 4


@contextlib.asynccontextmanager
async def lease(client: Any, version: WeightsVersion, timeout_s: float) -> AsyncIterator[None]:
    """Hold the version from before the first statement inside until after the last."""
    reader = secrets.token_hex(4)
    await client.put(lease_key(version, reader, 0), True)
    beating = asyncio.create_task(_beat(client, version, reader, timeout_s), name="lease")
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await _forget(client, version, reader)


async def _beat(client: Any, version: WeightsVersion, reader: str, timeout_s: float) -> None:
    beat = 0
    while True:
        await asyncio.sleep(timeout_s / BEATS_PER_TIMEOUT)
        beat += 1
        try:
            await client.put(lease_key(version, reader, beat), True)
            await client.delete(lease_key(version, reader, beat - 1))
        except Exception as error:
            logger.warning("a sign of life of a reader of weights %s failed: %r", version, error)


async def _forget(client: Any, version: WeightsVersion, reader: str) -> None:
    """Remove the lease; one that stays, because the store fails, will be seen to be dead."""
    try:
        for key in await client.keys(f"{leases_prefix(version)}.{reader}"):
            await client.delete(key)
    except Exception as error:
        logger.warning("could not end a lease on weights %s: %s", version, error)


class LeaseWatch:
    """The dropper's view of the leases."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._seen: dict[str, tuple[int, float]] = {}
        """Reader -> (its last beat, when that was first seen)."""

    async def living(self, client: Any, version: WeightsVersion | None = None) -> int:
        """How many readers hold the version, or any; the keys of dead ones are removed."""
        prefix = LEASES if version is None else leases_prefix(version)
        keys: dict[str, list[str]] = {}
        for key in await client.keys(prefix):
            keys.setdefault(f"{version_of(key)}.{_reader(key)}", []).append(key)
        now, living = self._clock(), 0
        for reader, own in keys.items():
            beat = max(_number(key) for key in own)
            last, since = self._seen.get(reader, (-1, now))
            self._seen[reader] = (beat, now if beat > last else since)
            if now - self._seen[reader][1] <= self._timeout_s:
                living += 1
                continue
            for key in own:
                # The reader may be ending its lease at the same time.
                with contextlib.suppress(Exception):
                    await client.delete(key)
            # Only now: whoever looks at the same time must not take it for a new one.
            self._seen.pop(reader, None)
        if version is None:
            self._seen = {reader: seen for reader, seen in self._seen.items() if reader in keys}
        return living


def _reader(key: str) -> str:
    return key.rsplit(".", 2)[1]


def _number(key: str) -> int:
    return int(key.rsplit(".", 1)[1])
