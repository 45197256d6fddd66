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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from forge_trainer.errors import WeightsError
from forge_trainer.functional.pieces.manifests import require_layout
from forge_trainer.pieces import (
    Layout,
    Manifest,
    PieceAddress,
    PieceRecord,
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
from forge_trainer.weights.torchstore.leases import LeaseWatch, lease

MAX_CONCURRENT_CALLS = 32
"""Each put or get is a call of its own; beyond a few in flight nothing gets faster."""

T = TypeVar("T")


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

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """What Monarch and torchstore raise, as the project's error."""
        try:
            yield
        except (WeightsError, asyncio.CancelledError):
            raise
        except Exception as error:
            # torchstore puts whatever fails in locating into the text of a KeyError.
            cause = (isinstance(error, KeyError) and error.__cause__) or error
            # The last line says it; of a missing key that is a list of all keys.
            reason = str(cause).strip().splitlines() or [""]
            raise WeightsError(
                f"{what}: the weight store {self._store_name!r} failed: {type(cause).__name__}: "
                f"{reason[-1][:200]}; if its process is gone, start a new one "
                "(`Services.restart_store`)"
            ) from error

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
        if staged.sources:
            await asyncio.to_thread(self._copier.copy, staged)
        client = await self.client()

        async def put(item: tuple[str, Tensor]) -> None:
            await client.put(f"{staged.location}.{item[0]}", item[1])

        names = [record.name for record in staged.layout.records]
        with self._failures(f"weights {staged.version}: cannot be written"):
            await _bounded_gather(put, list(zip(names, staged.copies, strict=True)))
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
                    keys = _Keys(client, manifest, self._spare, self._failures)
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
            await _bounded_gather(client.delete, await client.keys(prefix))

    def close(self) -> None:
        """Let go of what was kept for the next version."""
        self._plans, self._buffers, self._spare = Plans(), HostBuffers(), SpareBuffers()


class _Keys:
    """Keeps `PieceSource`."""

    def __init__(
        self,
        client: Any,
        manifest: Manifest,
        buffers: SpareBuffers,
        failures: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._client = client
        self._manifest = manifest
        self._buffers = buffers
        self._failures = failures

    async def fetch(self, pieces: Sequence[PieceAddress]) -> list[Tensor]:
        from torchstore.transport import Request

        any_tensor = Request.from_any(None)
        one_of_each = {piece.part: piece for piece in pieces}
        found = await _bounded_gather(self._volume_of, list(one_of_each.values()))
        volumes = dict(zip(one_of_each, found, strict=True))

        async def get(item: tuple[PieceAddress, Tensor]) -> Tensor:
            piece, buffer = item
            key = self._key(piece)
            with self._failures(self._what(piece)):
                data: Tensor = await volumes[piece.part].get_from_storage_volume(key, any_tensor)
            require_layout(self._manifest, piece, data)
            return buffer.copy_(data)

        # What arrives is in fresh memory, and holding all of that would take longer than a copy.
        buffers = self._buffers.take(_records(pieces))
        return await _bounded_gather(get, list(zip(pieces, buffers, strict=True)))

    async def _volume_of(self, piece: PieceAddress) -> Any:
        """Where a piece lies, and so all that its rank wrote.

        The client's own `get` asks for that twice per key, which is two of its three calls.
        """
        from torchstore.transport import Pipe

        with self._failures(self._what(piece)):
            (volume, *_) = await self._client._locate_volumes(self._key(piece))
        return Pipe(self._client.strategy.get_storage_volume(volume))

    def _key(self, piece: PieceAddress) -> str:
        return f"{self._manifest.parts[piece.part].location}.{piece.record.name}"

    def _what(self, piece: PieceAddress) -> str:
        record = piece.record
        version = self._manifest.version
        return f"weights {version}: cannot read the piece of {record.name} at {record.offsets}"

    def release(self, pieces: Sequence[PieceAddress], fetched: Sequence[Tensor]) -> None:
        self._buffers.give_back(_records(pieces), fetched)

    def require_unchanged(self) -> None:
        """What arrived is this process's own."""


def _records(pieces: Sequence[PieceAddress]) -> tuple[PieceRecord, ...]:
    return tuple(piece.record for piece in pieces)


async def _bounded_gather(function: Callable[[Any], Awaitable[T]], items: Sequence[Any]) -> list[T]:
    """The results in order, with at most MAX_CONCURRENT_CALLS running at once."""
    slots = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def run(item: Any) -> T:
        async with slots:
            return await function(item)

    tasks = [asyncio.ensure_future(run(item)) for item in items]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        # After a failure, too, nothing goes on behind the caller's back.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
