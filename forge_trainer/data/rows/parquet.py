"""Parquet files, read by row groups."""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_trainer.errors import ConfigError, DataError

from .protocol import Layout

HELD_BYTES = 256 * 1024**2
"""Of row groups that are kept decoded. Data beyond it is shuffled piece by piece."""


class ParquetRows:
    """Rows of one or more files. Those of a row group are near to each other."""

    def __init__(self, files: Sequence[Path], *, held_bytes: int = HELD_BYTES) -> None:
        """Read what the files say of themselves.

        Raises:
            ConfigError: one is no Parquet file or has a column twice, or they hold no row.
        """
        self._metadata = [(file, _read_metadata(file)) for file in files]
        groups = [
            (number, group, metadata.row_group(group))
            for number, (_, metadata) in enumerate(self._metadata)
            for group in range(metadata.num_row_groups)
        ]
        self._groups = [(number, group) for number, group, _ in groups]
        self._sizes = [facts.num_rows for _, _, facts in groups]
        self._ends = list(itertools.accumulate(self._sizes))
        if not len(self):
            raise ConfigError(f"task.path: {', '.join(map(str, files))} holds no row")
        largest = max(facts.total_byte_size for _, _, facts in groups)
        self._held = max(1, held_bytes // max(1, largest))
        self._tables: OrderedDict[int, Any] = OrderedDict()

    @property
    def layout(self) -> Layout:
        return Layout(self._sizes, self._held)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> dict[str, Any]:
        group = bisect.bisect_right(self._ends, index)
        table = self._table(group)
        start = self._ends[group] - self._sizes[group]
        (row,) = table.slice(index - start, 1).to_pylist()
        found: dict[str, Any] = row
        return found

    def where(self, index: int) -> str:
        number, _ = self._groups[bisect.bisect_right(self._ends, index)]
        before = sum(metadata.num_rows for _, metadata in self._metadata[:number])
        return f"{self._metadata[number][0]}, row {index - before} counted from 0"

    def _table(self, group: int) -> Any:
        """The group's rows; of groups read before, the newest stay."""
        if group not in self._tables:
            while len(self._tables) >= self._held:
                self._tables.popitem(last=False)
            self._tables[group] = self._read(group)
        self._tables.move_to_end(group)
        return self._tables[group]

    def _read(self, group: int) -> Any:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        number, group_of_file = self._groups[group]
        file, metadata = self._metadata[number]
        try:
            with ParquetFile(file, metadata=metadata) as opened:
                return opened.read_row_group(group_of_file)
        except (OSError, ArrowException) as error:
            raise DataError(f"row group {group_of_file} cannot be read: {error}") from error


def _read_metadata(file: Path) -> Any:
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    try:
        metadata = read_metadata(file)
        names = metadata.schema.to_arrow_schema().names
    except (OSError, ArrowException) as error:
        raise ConfigError(f"task.path: {file} is no Parquet file: {error}") from error
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"task.path: {file} has columns twice: {twice}; rename one of each")
    return metadata
