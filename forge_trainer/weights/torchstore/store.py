"""Weights in torchstore: works across hosts, any of its clients gets a tensor by name.

Ranks write pieces to the volume of their own host, many at a time. When all have written, the
version is published: every tensor appears under its key, whole, as if it had been put as a DTensor
by these ranks, and the manifest last. DTensors are not put as such: torchstore 0.1.2 cannot read
back empty shards, cannot delete half-written ones, and stores a replicated tensor once per rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Iterable
from typing import Any

from forge_trainer.functional.pieces.manifests import tensors_of
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
    manifest_key,
    mapping_key,
    missing,
    pieces_prefix,
    published_already,
    tensor_key,
    version_of,
)
from forge_trainer.weights.reading import Plans, VersionReading
from forge_trainer.weights.staging import (
    Block,
    HostBuffers,
    PackedPieces,
    PieceCopier,
    SpareBuffers,
    sources_of,
)

from .calls import bounded_gather, store_failures
from .leases import LeaseWatch, lease
from .source import VolumeSource
from .volumes import Volumes, place_of

BLOCK_BYTES = 4 * 2**20
"""What is sent in one call, but for larger pieces: enough for a call not to matter, and little
enough for one side to unpack while the other packs."""


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
        self._buffers = HostBuffers(BLOCK_BYTES)
        self._spare = SpareBuffers(BLOCK_BYTES)
        self._plans = Plans()

    async def client(self) -> Any:
        """torchstore's own client."""
        # Imported late: importing torchstore sets up root logging unless the process was prepared.
        import torchstore

        with self._failures("cannot be reached"):
            return await torchstore.client(self._store_name)

    async def _volumes(self) -> Volumes:
        return Volumes(await self.client())

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
            self._copier.copy(staged, copies.blocks)
        return staged

    async def write(self, staged: StagedPieces) -> RankPieces:
        copies = staged.copies
        assert isinstance(copies, PackedPieces), "staged by another store"
        await asyncio.to_thread(self._copier.complete, staged, copies.blocks)
        volumes = await self._volumes()

        async def write(block: Block) -> None:
            shapes = {index: staged.layout.records[index].shape for index in block.indices}
            await volumes.write(staged.location, block.numbers, shapes)

        with self._failures(f"weights {staged.version}: cannot be written"):
            await bounded_gather(write, copies.blocks)
            place = place_of(staged.location, volumes.own)
        return dataclasses.replace(staged.written, location=place)

    async def abandon(self, staged: StagedPieces) -> None:
        volumes = await self._volumes()
        with self._failures(f"weights {staged.version}: what was written cannot be removed"):
            await volumes.drop(staged.location)

    async def commit(self, manifest: Manifest) -> None:
        client = await self.client()
        with self._failures(f"weights {manifest.version}: cannot be published"):
            key = manifest_key(manifest.version)
            if await client.exists(key):
                raise published_already(manifest.version)
            await Volumes(client).publish(manifest)
            # As torchstore's put_state_dict leaves it.
            mapping = {name: (name,) for name in tensors_of(manifest)}
            await client.put(mapping_key(manifest.version), mapping)
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
                    source = VolumeSource(Volumes(client), manifest, self._spare, self._failures)
                    yield VersionReading(manifest, source, self._plans)
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
        client = await self.client()
        with self._failures(f"weights {version}: cannot be dropped"):
            if await client.exists(manifest_key(version)):
                await client.delete(manifest_key(version))
            if await self._watch.living(client, version):
                return False
            await Volumes(client).drop(pieces_prefix(version), tensor_key(version, ""))
        return True

    async def clean(self) -> list[WeightsVersion]:
        client = await self.client()
        held = await self.versions()
        with self._failures("the weights of former trainers cannot be removed"):
            locations = await Volumes(client).locations()
            left = {version_of(location) for location in locations} - set(held)
            read = [version for version in left if await self._watch.living(client, version)]
        for version in left - set(read):
            await self.drop(version)
        return read

    def close(self) -> None:
        """Let go of what was kept for the next version."""
        self._plans = Plans()
        self._buffers, self._spare = HostBuffers(BLOCK_BYTES), SpareBuffers(BLOCK_BYTES)
