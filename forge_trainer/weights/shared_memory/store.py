"""Weights in shared memory: for trainers and readers on one host. No call per tensor.

    manifests/e0v12          appears at once and whole, last; its removal hides the version
    leases/e0v12.5f0c3a      locked as long as that reader lives and reads
    segments/r1-9ab2f0.0     pieces of rank 1, see `Segment`

The reader makes its lease, then opens the manifest; the dropper removes the manifest, then looks
for leases, then lets the segments be used again. Locks are the kernel's: a reader that dies has
none, one that is stopped keeps its own, and no clock is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pickle
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

from forge_trainer.errors import WeightsError
from forge_trainer.pieces import (
    Layout,
    Manifest,
    RankPieces,
    StagedPieces,
    Verify,
    WeightPiece,
    WeightsVersion,
)
from forge_trainer.weights.keys import missing, published_already, version_of
from forge_trainer.weights.reading import Plans, VersionReading
from forge_trainer.weights.staging import PieceCopier, sources_of

from .folder import LEASES, MANIFESTS, SEGMENTS, can_lock, hold
from .segments import Segment, packed_bytes
from .source import SegmentSource, place, places


class SharedMemoryWeightStore:
    """Keeps the `WeightStore` protocol over a folder made by `shared_folder`."""

    transport = "shared_memory"

    def __init__(self, folder: Path, verify: Verify = "full") -> None:
        self._manifests = folder / MANIFESTS
        self._leases = folder / LEASES
        self._segments = folder / SEGMENTS
        self._lock: int | None = hold(folder)
        self._id = secrets.token_hex(4)
        self._own: list[Segment] = []
        self._num_created = 0
        self._layout: Layout | None = None
        self._copier = PieceCopier(verify)
        self._mapped: dict[str, Segment] = {}
        self._plans = Plans()
        self._hidden: dict[WeightsVersion, Manifest] = {}
        self._inherited: set[str] = set()

    @contextlib.contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """What the system raises, as the project's error."""
        try:
            yield
        except OSError as error:
            raise WeightsError(
                f"{what}: shared memory in {self._segments.parent} failed: {error}"
            ) from error

    def close(self) -> None:
        """Let go of the folder and the reader's tensors; it may be said more than once."""
        self._plans = Plans()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

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
        layout = self._layout = Layout.of(pieces, self._layout)
        with self._failures(f"weights {version}: cannot be staged"):
            segment = self._take_segment(rank, packed_bytes(layout))
        location = f"{segment.path.name}:{segment.begin()}"
        sources, ready = sources_of(pieces)
        copies = segment.views(layout)
        staged = StagedPieces(version, layout, sources, copies, location, ready)
        if not in_place:
            try:
                self._copier.copy(staged, segment.blocks(layout))
            except BaseException:
                self._free(location)
                raise
        return staged

    def _take_segment(self, rank: int, num_bytes: int) -> Segment:
        """A free segment of this rank's, or a new one."""
        free = [one for one in self._own if one.is_free and one.path.name.startswith(f"r{rank}-")]
        for segment in free:
            if segment.num_bytes == num_bytes:
                return segment
            # The model's layout has changed.
            self._own.remove(segment)
            segment.path.unlink(missing_ok=True)
        path = self._segments / f"r{rank}-{self._id}.{self._num_created}"
        segment = Segment.create(path, num_bytes)
        self._num_created += 1
        self._own.append(segment)
        return segment

    def _segment_at(self, location: str) -> Segment:
        name, _ = place(location)
        return next(segment for segment in self._own if segment.path.name == name)

    async def write(self, staged: StagedPieces) -> RankPieces:
        blocks = self._segment_at(staged.location).blocks(staged.layout)
        await asyncio.to_thread(self._copier.complete, staged, blocks)
        return staged.written

    async def abandon(self, staged: StagedPieces) -> None:
        self._free(staged.location)

    def _free(self, location: str) -> None:
        """Let a segment be used again, or remove one of a publisher that is gone."""
        name, generation = place(location)
        with contextlib.suppress(FileNotFoundError):
            if name in self._inherited:
                (self._segments / name).unlink()
            else:
                Segment.free(self._segments / name, generation)

    async def commit(self, manifest: Manifest) -> None:
        new = self._segments.parent / f"new-{secrets.token_hex(6)}"
        with self._failures(f"weights {manifest.version}: cannot be published"):
            try:
                new.write_bytes(pickle.dumps(manifest))
                # Unlike a rename, this fails if there is one already.
                os.link(new, self._manifests / str(manifest.version))
            except FileExistsError as error:
                raise published_already(manifest.version) from error
            finally:
                new.unlink(missing_ok=True)

    # Reading

    async def versions(self) -> list[WeightsVersion]:
        with self._failures("the versions of weights cannot be listed"):
            return sorted(version_of(path.name) for path in self._manifests.iterdir())

    @contextlib.asynccontextmanager
    async def reading(self, version: WeightsVersion | None = None) -> AsyncIterator[VersionReading]:
        while True:
            held = await self.versions()
            wanted = version or (held[-1] if held else None)
            if wanted is None:
                raise missing(wanted, held)
            with self._lease(wanted):
                manifest = self._read_manifest(wanted)
                if manifest is not None:
                    yield VersionReading(manifest, self._map_segments(manifest), self._plans)
                    return
            if version is not None:
                raise missing(wanted, await self.versions())
            # The newest was dropped between looking and holding: there is a newer one, or none.

    @contextlib.contextmanager
    def _lease(self, version: WeightsVersion) -> Iterator[None]:
        path = self._leases / f"{version}.{secrets.token_hex(6)}"
        with self._failures(f"weights {version}: cannot be held"):
            lease = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lease, fcntl.LOCK_EX)
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(lease)

    def _read_manifest(self, version: WeightsVersion) -> Manifest | None:
        try:
            manifest: Manifest = pickle.loads((self._manifests / str(version)).read_bytes())
        except FileNotFoundError:
            return None
        return manifest

    def _map_segments(self, manifest: Manifest) -> SegmentSource:
        """Mappings are kept for later versions, which use the same files."""
        named = places(manifest)
        wanted = {name for name, _ in named}
        for name in [name for name in self._mapped if name not in wanted]:
            if not (self._segments / name).exists():
                del self._mapped[name]
        with self._failures(f"weights {manifest.version}: cannot be read"):
            for name in wanted - self._mapped.keys():
                self._mapped[name] = Segment(self._segments / name)
        return SegmentSource(manifest, [(self._mapped[name], gen) for name, gen in named])

    async def num_readers(self) -> int:
        with self._failures("the leases on weights cannot be listed"):
            return sum(_is_locked(path) for path in self._leases.iterdir())

    # Dropping

    async def drop(self, version: WeightsVersion) -> bool:
        manifest = self._read_manifest(version)
        if manifest is not None:
            self._hidden[version] = manifest
            (self._manifests / str(version)).unlink()
        if version not in self._hidden:
            return True
        for lease in self._leases.glob(f"{version}.*"):
            if _is_locked(lease):
                return False
            lease.unlink(missing_ok=True)
        for part in self._hidden.pop(version).parts:
            self._free(part.location)
        return True

    async def clean(self) -> list[WeightsVersion]:
        held = await self.versions()
        manifests = [self._read_manifest(version) for version in held]
        named = {name for one in manifests if one is not None for name, _ in places(one)}
        for path in self._segments.iterdir():
            if path.name in named:
                self._inherited.add(path.name)
            else:
                path.unlink(missing_ok=True)
        for path in self._segments.parent.glob("new-*"):
            path.unlink(missing_ok=True)
        for lease in self._leases.iterdir():
            # A reader of a version that exists may be about to lock its own.
            if version_of(lease.name) not in held and not _is_locked(lease):
                lease.unlink(missing_ok=True)
        # Who reads a hidden version has its segments mapped: they may lose their names.
        return []


def _is_locked(path: Path) -> bool:
    try:
        # Shared: two that look at once are no readers to each other.
        return not can_lock(path, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
