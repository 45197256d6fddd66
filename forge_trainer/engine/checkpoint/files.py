"""Folders of checkpoints: which are complete, which is newest, which may go. No tensors here.

A folder without its marker is incomplete and never loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from forge_trainer.errors import CheckpointError
from forge_trainer.types import CheckpointFormat

logger = logging.getLogger(__name__)

HASH_BLOCK_BYTES = 1 << 22
MARKER = "forge_trainer.json"
"""Holds the step and a hash of every file. Present exactly in complete checkpoints."""


@dataclass(frozen=True, slots=True)
class Marker:
    """What makes a checkpoint complete."""

    step: int
    format: CheckpointFormat
    weights_only: bool
    layout: str
    """Of the ranks that wrote it, each with random state of its own."""
    saved_at: float
    """Seconds since the epoch; tells which is the newest, also after going back to an older one."""
    xxh3_128: dict[str, str]
    """Hash of every file, hexadecimal."""


def write_marker(path: Path, marker: Marker) -> None:
    """Make the folder `path` a complete checkpoint."""
    values = dataclasses.asdict(marker)
    with (path / MARKER).open("w") as stream:
        json.dump({**values, "own_hash": _hash_values(values)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def read_marker(path: Path) -> Marker:
    """The marker of the checkpoint at `path`.

    Raises:
        CheckpointError: there is no checkpoint, it is incomplete, or its marker is damaged.
    """
    file = path / MARKER
    if not file.is_file():
        if path.is_dir():
            why = f"lacks {MARKER}, so it is incomplete"
        else:
            why = "is not a directory" if path.exists() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {why}")
    try:
        values = json.loads(file.read_text())
        own_hash = values.pop("own_hash")
        marker = Marker(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path}: {MARKER} is damaged: {error!r}") from error
    if own_hash != _hash_values(values):
        raise CheckpointError(f"checkpoint {path}: {MARKER} is damaged, its own hash differs")
    return marker


def _hash_values(values: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def verify_files(path: Path, marker: Marker, names: Iterable[str]) -> None:
    """The named files of the checkpoint at `path` are as they were written.

    Raises:
        CheckpointError: names the file that is missing or has changed.
    """
    for name in names:
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path}: {name} is missing")
        if hash_file(file) != marker.xxh3_128[name]:
            raise CheckpointError(f"checkpoint {path}: {name} is damaged, its hash differs")


def files_in(folder: Path) -> set[str]:
    """Names of all files, relative to the folder."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def hash_file(file: Path) -> str:
    """xxh3-128 of the file's bytes, hexadecimal."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def flush_to_disk(path: Path) -> None:
    """What is in the file or folder survives a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def partial_folder(path: Path) -> Path:
    """A new empty folder beside `path` to write to; what an earlier try has left goes.

    Raises:
        CheckpointError: `path` exists already.
    """
    if path.exists():
        raise CheckpointError(
            f"{path} exists already; a checkpoint is never overwritten: give another name, or "
            "remove it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.partial-????????"):
        shutil.rmtree(left, ignore_errors=True)
    partial = path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    return partial


def default_name(step: int, *, format: CheckpointFormat, weights_only: bool) -> str:
    """The name of a checkpoint that was given none."""
    if format == "hf":
        return f"hf-{step}"
    return f"weights-{step}" if weights_only else step_name(step)


def step_name(step: int) -> str:
    """The name of a checkpoint of full state that was given none."""
    return f"step-{step}"


def find_checkpoint(
    folder: Path,
    *,
    path: str | None = None,
    name: str | None = None,
    step: int | None = None,
    weights_only: bool = False,
) -> Path:
    """The checkpoint asked for; without `path`, `name` and `step` the complete one saved last.

    Raises:
        CheckpointError: more than one is given, or there is no complete one.
    """
    given = [value for value in (path, name, step) if value is not None]
    if len(given) > 1:
        raise CheckpointError(f"give at most one of path, name and step, got {given}")
    if path is not None:
        return Path(path)
    if name is not None:
        return folder / name
    if step is not None:
        return folder / step_name(step)
    newest = newest_checkpoint(folder, weights_only=weights_only)
    if newest is None:
        raise CheckpointError(f"no complete checkpoint in {folder}; nothing was loaded")
    return newest


def newest_checkpoint(folder: Path, *, weights_only: bool = False) -> Path | None:
    """The complete checkpoint in `folder` that was saved last, if there is one.

    Of full state, unless `weights_only`.
    """
    complete = {
        path: marker
        for path, marker in complete_checkpoints(folder).items()
        if marker.format == "dcp" and (weights_only or not marker.weights_only)
    }
    return max(complete, key=lambda path: complete[path].saved_at, default=None)


def complete_checkpoints(folder: Path) -> dict[Path, Marker]:
    """The complete checkpoints in `folder`.

    Folders that are not complete are skipped with a warning that names them.
    """
    found: dict[Path, Marker] = {}
    for path in sorted(path for path in folder.glob("*") if path.is_dir()):
        try:
            found[path] = read_marker(path)
        except CheckpointError as error:
            logger.warning("skipped: %s", error)
    return found


def prune_checkpoints(folder: Path, keep: int) -> list[Path]:
    """Delete all but the `keep` last saved complete ones of those named by step; what was deleted.

    Checkpoints that were given a name stay, and so do links and everything that is not complete.
    What cannot be deleted is left with a warning.
    """
    saved_at = {}
    for path in folder.glob("step-*"):
        if path.is_symlink() or not (path / MARKER).is_file():
            continue
        with contextlib.suppress(CheckpointError):
            marker = read_marker(path)
            if not marker.weights_only and path.name == step_name(marker.step):
                saved_at[path] = marker.saved_at
    deleted = sorted(saved_at, key=lambda path: saved_at[path])[:-keep]
    for path in deleted:
        try:
            # Without its marker it is incomplete: a crash in here leaves nothing half-loadable.
            (path / MARKER).unlink()
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("the old checkpoint %s is not deleted: %s", path, error)
    return deleted
