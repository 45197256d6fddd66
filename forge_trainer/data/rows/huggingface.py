"""A data set of Hugging Face's `datasets`: saved on disk, a directory of files, or of the hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_trainer.errors import ConfigError

from .protocol import Layout, one_by_one


class HuggingFaceRows:
    """Rows of a data set, which maps its files into memory by itself."""

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        """Load it; `options` go to `datasets.load_dataset`, but for `split` on a saved data set.

        Raises:
            ConfigError: it cannot be loaded, has several splits and none is chosen, or no row.
        """
        self._path = path
        self._rows = _one_split(path, _load(path, dict(options)))
        if not len(self):
            raise ConfigError(f"task.path: {path} holds no row")

    @property
    def layout(self) -> Layout:
        return one_by_one(len(self))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[index]
        return row

    def where(self, index: int) -> str:
        return f"{self._path}, row {index} counted from 0"


def _load(path: str, options: dict[str, Any]) -> Any:
    import datasets

    folder = Path(path)
    if not folder.is_dir() and (folder.exists() or path.startswith((".", "/"))):
        raise ConfigError(
            f"task.path: {path} is no directory; give one, or a hub id (a file is read by "
            "task.name: jsonl or parquet)"
        )
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if saved and set(options) - {"split"}:
        raise ConfigError(
            f"task.options: {path} was saved by save_to_disk, which knows split alone, got "
            f"{sorted(options)}"
        )
    try:
        loaded = datasets.load_from_disk(path) if saved else datasets.load_dataset(path, **options)
    except Exception as error:
        raise ConfigError(
            f"task.path: datasets cannot load {path!r} with options {options}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return _chosen(path, loaded, options.get("split")) if saved else loaded


def _chosen(path: str, loaded: Any, split: str | None) -> Any:
    """The split of what was saved."""
    splits = loaded if isinstance(loaded, dict) else {str(loaded.split): loaded}
    if split is None:
        return loaded
    if split not in splits:
        raise ConfigError(
            f"task.options: {path} has no split {split!r}; it has {sorted(splits)}, and what was "
            "saved cannot be sliced"
        )
    return splits[split]


def _one_split(path: str, loaded: Any) -> Any:
    if isinstance(loaded, dict):
        if len(loaded) != 1:
            raise ConfigError(
                f"task.options: {path} has the splits {sorted(loaded)}; choose one, such as "
                "{split: train}"
            )
        (loaded,) = loaded.values()
    if not hasattr(loaded, "__len__"):
        raise ConfigError(
            f"task.options: {path} is streamed and its rows cannot be counted; leave streaming out"
        )
    return loaded
