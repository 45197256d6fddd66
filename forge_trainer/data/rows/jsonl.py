"""JSON Lines: one object a line. Of the file, only where its lines begin is kept in memory."""

from __future__ import annotations

import bisect
import itertools
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_trainer.errors import ConfigError, DataError

from .protocol import Layout, one_by_one

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLines:
    """Rows of one or more files. Lines of nothing but white space are none."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the files once, to find their lines: 8 bytes of memory for each.

        Raises:
            ConfigError: a file cannot be read, or they hold no row.
        """
        self._files = list(files)
        self._starts = [_line_starts(file) for file in files]
        self._ends = list(itertools.accumulate(map(len, self._starts)))
        if not len(self):
            raise ConfigError(f"task.path: {', '.join(map(str, files))} holds no line")

    @property
    def layout(self) -> Layout:
        return one_by_one(len(self))

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, index: int) -> dict[str, Any]:
        file, start = self._find(index)
        try:
            with file.open("rb") as opened:
                opened.seek(start)
                line = opened.readline()
            text = line.removeprefix(BYTE_ORDER_MARK if start == 0 else b"").decode()
            value = json.loads(text.rstrip(), object_pairs_hook=_unique_keys)
        except OSError as error:
            raise DataError(f"it cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise DataError(f"it is not UTF-8: {error.reason} at byte {error.start + 1}") from error
        except json.JSONDecodeError as error:
            raise DataError(f"it is not JSON: {error.msg} at character {error.pos + 1}") from error
        if not isinstance(value, dict):
            raise DataError(f"it must be a JSON object, got {type(value).__name__}")
        return value

    def where(self, index: int) -> str:
        file, start = self._find(index)
        line = 1
        try:
            with file.open("rb") as opened:
                while start > 0 and (text := opened.readline()):
                    start -= len(text)
                    line += 1
        except OSError:
            return f"{file}, byte {start}"
        return f"{file}, line {line}"

    def _find(self, index: int) -> tuple[Path, int]:
        number = bisect.bisect_right(self._ends, index)
        starts = self._starts[number]
        return self._files[number], starts[index - self._ends[number]]


def _line_starts(file: Path) -> array[int]:
    starts, start = array("Q"), 0
    try:
        with file.open("rb") as lines:
            for line in lines:
                if not line.isspace():
                    starts.append(start)
                start += len(line)
    except OSError as error:
        raise ConfigError(f"task.path: cannot read {file}: {error.strerror}") from error
    return starts


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON's objects leave open what a second key means; Python would take the last."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"it has {twice!r} twice")
    return row
