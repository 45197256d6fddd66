"""Weights in torchstore: works across hosts, any tensor can be fetched by name.

Pieces are plain tensors under keys of their own version. DTensors are not put as such:
torchstore 0.1.2 cannot read back empty shards, cannot delete half-written ones, and stores a
replicated tensor once per rank. The manifest knows the offsets instead. Where torchstore finds
RDMA, its puts and gets go that way by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any

from torch import Tensor

from forge_trainer.pieces import (
    Layout,
    Manifest,
    RankPieces,
    StagedPieces,
    Verify,
    WeightPiece,
    WeightsVersion,
)
from forge_trainer.weights.keys import (
    MANIFESTS,
    WEIGHTS,
    manifest_key,
    missing,
    pieces_prefix,
    published_already,
    version_of,
)
from forge_trainer.weights.reading import Plans, VersionReading
from forge_trainer.weights.staging import HostBuffers, PieceCopier, SpareBuffers, sources_of

from .calls import bounded_gather, store_failures
from .leases import LeaseWatch, lease
from .source import KeySource


class TorchStoreWeightStore:
    """Keeps the `WeightStore` protocol over a torchstore that is running already."""

    transport = "torchstore"

    def __init__(
        self, store_name: str, verify: Verify = "full", *, lease_timeout_s: float = 30.0
    ) -> None:
        self._store_name = store_name
        self._lease_timeout_s = lease_timeout_s
        self._watch = LeaseWatch(lease_timeout_s)
        self._copier = PieceCopier(verify)
        self._buffers = HostBuffers()
        self._spare = SpareBuffers()
        self._plans = Plans()

    async def client(self) -> Any:
        """torchstore's own client."""
        # Imported late: importing torchstore sets up root logging unless the process was prepared.
        import torchstore

        with self._failures("cannot be reached"):
            return await torchstore.client(self._store_name)

    def _failures(self, what: str) -> contextlib.AbstractContextManager[None]:
        return store_failures(self._store_name, what)

    # Publishing

    def stage(
        self,
        version: WeightsVersion,
        rank: int,
        pieces: Iterable[WeightPiece],
        *,
        in_place: bool = False,
    ) -> StagedPieces:
        pieces = list(pieces)
        layout = Layout.of(pieces, self._buffers.layout)
        sources, ready = sources_of(pieces)
        copies = self._buffers.take(layout)
        # Whoever tries a version again does not meet what a failed push may still be sending.
        location = f"{pieces_prefix(version, rank)}.{secrets.token_hex(4)}"
        staged = StagedPieces(version, layout, sources, copies, location, ready)
        if not in_place:
            self._copier.copy(staged)
        return staged

    async def write(self, staged: StagedPieces) -> RankPieces:
        await asyncio.to_thread(self._copier.complete, staged)
        client = await self.client()

        async def put(item: tuple[str, Tensor]) -> None:
            await client.put(f"{staged.location}.{item[0]}", item[1])

        names = [record.name for record in staged.layout.records]
        with self._failures(f"weights {staged.version}: cannot be written"):
            await bounded_gather(put, list(zip(names, staged.copies, strict=True)))
        return staged.written

    async def abandon(self, staged: StagedPieces) -> None:
        await self._delete_all(staged.location)

    async def commit(self, manifest: Manifest) -> None:
        client = await self.client()
        with self._failures(f"weights {manifest.version}: cannot be published"):
            key = manifest_key(manifest.version)
            if await client.exists(key):
                raise published_already(manifest.version)
            await client.put(key, manifest)

    # Reading

    async def versions(self) -> list[WeightsVersion]:
        client = await self.client()
        with self._failures("the versions of weights cannot be listed"):
            return sorted(version_of(key) for key in await client.keys(MANIFESTS))

    @contextlib.asynccontextmanager
    async def reading(self, version: WeightsVersion | None = None) -> AsyncIterator[VersionReading]:
        client = await self.client()
        while True:
            held = [] if version is not None else await self.versions()
            wanted = version or (held[-1] if held else None)
            if wanted is None:
                raise missing(wanted, held)
            async with self._lease(client, wanted):
                manifest = await self._read_manifest(client, wanted)
                if manifest is not None:
                    keys = KeySource(client, manifest, self._spare, self._failures)
                    yield VersionReading(manifest, keys, self._plans)
                    return
            if version is not None:
                raise missing(wanted, await self.versions())
            # The newest was dropped between looking and holding: there is a newer one, or none.

    @contextlib.asynccontextmanager
    async def _lease(self, client: Any, version: WeightsVersion) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            with self._failures(f"weights {version}: cannot be held"):
                await stack.enter_async_context(lease(client, version, self._lease_timeout_s))
            yield

    async def _read_manifest(self, client: Any, version: WeightsVersion) -> Manifest | None:
        key = manifest_key(version)
        with self._failures(f"weights {version}: cannot be read"):
            try:
                manifest: Manifest = await client.get(key)
            except Exception:
                # It may go between being located and being read, and torchstore makes a KeyError
                # of failures to locate, too.
                if await client.exists(key):
                    raise
                return None
            return manifest

    async def num_readers(self) -> int:
        client = await self.client()
        with self._failures("the leases on weights cannot be listed"):
            return await self._watch.living(client)

    # Dropping

    async def drop(self, version: WeightsVersion) -> bool:
        await self._delete_all(manifest_key(version))
        client = await self.client()
        with self._failures(f"weights {version}: cannot be dropped"):
            if await self._watch.living(client, version):
                return False
        await self._delete_all(pieces_prefix(version))
        return True

    async def clean(self) -> list[WeightsVersion]:
        client = await self.client()
        held = await self.versions()
        with self._failures("the weights of former trainers cannot be removed"):
            left = {version_of(key) for key in await client.keys(WEIGHTS)} - set(held)
            read = [version for version in left if await self._watch.living(client, version)]
        for version in left - set(read):
            await self._delete_all(pieces_prefix(version))
        return read

    async def _delete_all(self, prefix: str) -> None:
        client = await self.client()
        with self._failures(f"{prefix} cannot be deleted"):
            await bounded_gather(client.delete, await client.keys(prefix))

    def close(self) -> None:
        """Let go of what was kept for the next version."""
        self._plans, self._buffers, self._spare = Plans(), HostBuffers(), SpareBuffers()
