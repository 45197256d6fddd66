"""What processes log: a file for each, and errors on the console with who they are of."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclass(frozen=True, slots=True)
class RankLogs:
    """Where the processes of a run log, and how much."""

    folder: str
    """Gets a file per process, such as trainer-0.log; made if it is not there."""
    level: str = "INFO"


def set_up_logging(
    logs: RankLogs | None, *, mesh: str, rank: int, takes_output: bool = False
) -> None:
    """Let this process log; without `logs`, only errors to the console.

    With `takes_output`, what it prints goes to its file, too: hosts throw it away.
    """
    root = logging.getLogger()
    console = _OneLine(sys.stderr)
    console.setLevel(logging.ERROR)
    console.setFormatter(logging.Formatter(f"%(levelname)s {mesh} {rank}: %(message)s"))
    root.addHandler(console)
    if logs is not None:
        folder = Path(logs.folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{mesh}-{rank}.log"
        file = logging.FileHandler(path)
        file.setFormatter(logging.Formatter(LINE))
        root.addHandler(file)
        root.setLevel(logs.level)
        if takes_output:
            _redirect_output(path)


def _redirect_output(path: Path) -> None:
    """Also what libraries write past Python, such as NCCL."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


@contextlib.contextmanager
def controller_log(logs: RankLogs | None) -> Iterator[None]:
    """The controller's own file, controller.log; what the console gets stays as it is."""
    if logs is None:
        yield
        return
    root, folder = logging.getLogger(), Path(logs.folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(folder / "controller.log")
    file.setFormatter(logging.Formatter(LINE))
    level, levels = root.level, {handler: handler.level for handler in root.handlers}
    for handler in levels:
        handler.setLevel(max(handler.level, level))
    root.addHandler(file)
    root.setLevel(min(level, logging.getLevelNamesMapping()[logs.level]))
    try:
        yield
    finally:
        root.removeHandler(file)
        file.close()
        root.setLevel(level)
        for handler, before in levels.items():
            handler.setLevel(before)


class _OneLine(logging.StreamHandler):  # type: ignore[type-arg]
    """Without tracebacks: those are in the file, and the error itself reaches the caller."""

    def emit(self, record: logging.LogRecord) -> None:
        short = copy.copy(record)
        short.exc_info = short.exc_text = short.stack_info = None
        super().emit(short)
