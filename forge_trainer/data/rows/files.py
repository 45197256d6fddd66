"""Which files a path of the config means."""

from __future__ import annotations

import glob
from pathlib import Path

from forge_trainer.errors import ConfigError

SHOWN = 5


def find_files(path: str) -> list[Path]:
    """The file, or all files that the pattern matches, sorted by name.

    Raises:
        ConfigError: there is none; what lies beside it is named.
    """
    if Path(path).is_file():
        return [Path(path)]
    if Path(path).is_dir():
        raise ConfigError(
            f"task.path: {path} is a directory; give a file or a pattern, such as "
            f"{path.rstrip('/')}/*; it holds {_content(Path(path))}"
        )
    found = sorted(match for match in map(Path, glob.glob(path, recursive=True)) if match.is_file())
    if not found:
        raise ConfigError(f"task.path: there is no {path}; {_nearest(Path(path))}")
    return found


def _nearest(path: Path) -> str:
    """What there is where the path ends to be right."""
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    return f"{folder} holds {_content(folder)}"


def _content(folder: Path) -> str:
    names = sorted(child.name for child in folder.iterdir() if not child.name.startswith("."))
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) or "nothing") + more
