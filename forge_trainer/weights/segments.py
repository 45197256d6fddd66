"""A segment: one mapped file that holds what one rank wrote of one version.

It is used again for a later version, since a first write to fresh pages costs several times a
copy. Its generation counts the versions; a reader that finds another one than its manifest says
has come too late.
"""

from __future__ import annotations

import errno
import functools
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from forge_trainer.errors import WeightsError
from forge_trainer.pieces import PieceRecord

_HEADER = struct.Struct("<QQ")
"""Generation; 1 while a version uses the segment."""
DATA_START = 4096
ALIGNMENT = 64


@functools.lru_cache(maxsize=8)
def pack(records: tuple[PieceRecord, ...]) -> tuple[tuple[int, ...], int]:
    """Where each piece starts, in bytes, and how long all are; one dtype follows the other."""
    starts = [0] * len(records)
    end = 0
    for index in sorted(range(len(records)), key=lambda index: records[index].dtype):
        starts[index] = end
        end += -(-records[index].num_bytes // ALIGNMENT) * ALIGNMENT
    return tuple(starts), end


class Segment:
    """A mapped file; the mapping lives as long as any tensor that looks at it."""

    def __init__(self, path: Path) -> None:
        """Map an existing one.

        Raises:
            FileNotFoundError: there is none.
        """
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # All pages at once: page by page, the first pass over them takes several times as long.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._map = mmap.mmap(fd, 0, flags=flags)
        finally:
            os.close(fd)
        self.num_bytes = len(self._map) - DATA_START
        self._views: tuple[tuple[PieceRecord, ...], list[Tensor]] | None = None

    @classmethod
    def create(cls, path: Path, num_bytes: int) -> Segment:
        """A new one, free.

        Raises:
            WeightsError: there is no room.
        """
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Without this, a full file system kills the writer with SIGBUS at some later byte.
            os.posix_fallocate(fd, 0, DATA_START + num_bytes)
        except OSError as error:
            path.unlink()
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            stats = os.statvfs(path.parent)
            raise WeightsError(
                f"no room for {num_bytes / 2**20:.1f} MiB of weights in {path.parent}: "
                f"{stats.f_bavail * stats.f_frsize / 2**20:.1f} MiB are free "
                f"({error.strerror}); enlarge it, set weights.shared_memory_folder, lower "
                "weights.keep_versions or use weights.transport: torchstore"
            ) from error
        finally:
            os.close(fd)
        return cls(path)

    @property
    def generation(self) -> int:
        """How many versions have used it."""
        return int(_HEADER.unpack_from(self._map)[0])

    @property
    def is_free(self) -> bool:
        return int(_HEADER.unpack_from(self._map)[1]) == 0

    def begin(self) -> int:
        """Take it for a version; its generation."""
        generation = self.generation + 1
        _HEADER.pack_into(self._map, 0, generation, 1)
        return generation

    @staticmethod
    def free(path: Path, generation: int) -> None:
        """Nobody needs what it held in that generation. Any process may say so.

        Raises:
            FileNotFoundError: it is gone.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _HEADER.unpack(os.pread(fd, _HEADER.size, 0))[0] == generation:
                os.pwrite(fd, _HEADER.pack(generation, 0), 0)
        finally:
            os.close(fd)

    def views(self, records: tuple[PieceRecord, ...]) -> list[Tensor]:
        """The pieces as tensors, without a copy."""
        # By identity: comparing hundreds of records takes longer than copying small tensors.
        if self._views is None or self._views[0] is not records:
            starts, num_bytes = pack(records)
            if num_bytes > self.num_bytes:
                raise WeightsError(f"segment {self.path} is shorter than its manifest says")
            views = [
                self._view(record, start) for record, start in zip(records, starts, strict=True)
            ]
            self._views = records, views
        return self._views[1]

    def runs(self, records: Sequence[PieceRecord]) -> list[Tensor]:
        """All numbers of a dtype as one tensor; gaps between pieces hold zeros."""
        starts, _ = pack(tuple(records))
        ends: dict[str, tuple[int, int]] = {}
        for record, start in zip(records, starts, strict=True):
            first, last = ends.get(record.dtype, (start, start))
            ends[record.dtype] = min(first, start), max(last, start + record.num_bytes)
        dtypes = {record.dtype: record.torch_dtype for record in records}
        return [
            torch.frombuffer(
                self._map,
                dtype=dtypes[name],
                offset=DATA_START + start,
                count=(end - start) // dtypes[name].itemsize,
            )
            for name, (start, end) in ends.items()
            if end > start
        ]

    def _view(self, record: PieceRecord, start: int) -> Tensor:
        count = record.num_bytes // record.torch_dtype.itemsize
        if count == 0:
            return torch.empty(record.shape, dtype=record.torch_dtype)
        flat = torch.frombuffer(
            self._map, dtype=record.torch_dtype, offset=DATA_START + start, count=count
        )
        return flat.view(record.shape)
