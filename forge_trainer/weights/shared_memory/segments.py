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
from pathlib import Path

import torch
from torch import Tensor

from forge_trainer.errors import WeightsError
from forge_trainer.pieces import Layout, PieceRecord
from forge_trainer.weights.staging import Block, in_blocks

_HEADER = struct.Struct("<QQ")
"""Generation; 1 while a version uses the segment."""
DATA_START = 4096
ALIGNMENT = 64
BLOCK_BYTES = 512 * 1024
"""Fits into a core's own cache."""


@functools.lru_cache(maxsize=8)
def packed_bytes(layout: Layout) -> int:
    """What the pieces take in a segment."""
    return sum(_padded(record) for record in layout.records)


def _padded(record: PieceRecord) -> int:
    return -(-record.num_bytes // ALIGNMENT) * ALIGNMENT


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
        self._layout: Layout | None = None
        self._views: list[Tensor] = []
        self._blocks: list[Block] = []

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
        try:
            return cls(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

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

    def views(self, layout: Layout) -> list[Tensor]:
        """The pieces as tensors, without a copy."""
        self._look_through(layout)
        return self._views

    def blocks(self, layout: Layout) -> list[Block]:
        """The pieces in the order in which they lie, in blocks of one dtype."""
        self._look_through(layout)
        return self._blocks

    def _look_through(self, layout: Layout) -> None:
        """Lay the layout over the mapped bytes: one dtype after the other."""
        if self._layout is layout:
            return
        if packed_bytes(layout) > self.num_bytes:
            raise WeightsError(f"segment {self.path} is shorter than its manifest says")
        views: dict[int, Tensor] = {}
        blocks: list[Block] = []
        end = DATA_START
        for dtype, indices in in_blocks(layout.records, BLOCK_BYTES):
            start = end
            for index in indices:
                record = layout.records[index]
                views[index] = self._tensor(dtype, end, record.num_bytes).view(record.shape)
                end += _padded(record)
            # Gaps between pieces hold zeros.
            blocks.append(Block(tuple(indices), self._tensor(dtype, start, end - start)))
        self._views = [views[index] for index in range(len(views))]
        self._blocks = blocks
        self._layout = layout

    def _tensor(self, dtype: torch.dtype, start: int, num_bytes: int) -> Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=dtype)
        count = num_bytes // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, offset=start, count=count)
