"""Folders of checkpoints: which are complete, which is newest, which may go. No tensors here.

A folder without its marker is incomplete and never loaded.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
    num_ranks: int
    """That wrote it, each with random state of its own."""
    xxh3_128: dict[str, str]
    """Hash of every file, hexadecimal."""


def write_marker(path: Path, marker: Marker) -> None:
    """Make the folder `path` a complete checkpoint."""
    (path / MARKER).write_text(json.dumps(dataclasses.asdict(marker), indent=1))


def read_marker(path: Path) -> Marker:
    """The marker of the checkpoint at `path`.

    Raises:
        CheckpointError: there is no checkpoint, it is incomplete, or its marker is damaged.
    """
    file = path / MARKER
    if not file.is_file():
        why = f"lacks {MARKER}, so it is incomplete" if path.is_dir() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {why}")
    try:
        values = json.loads(file.read_text())
        return Marker(
            step=int(values["step"]),
            format=values["format"],
            weights_only=bool(values["weights_only"]),
            num_ranks=int(values["num_ranks"]),
            xxh3_128=dict(values["xxh3_128"]),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path}: {MARKER} is damaged: {error!r}") from error


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


def hash_file(file: Path) -> str:
    """xxh3-128 of the file's bytes, hexadecimal."""
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def step_name(step: int) -> str:
    """The name of a checkpoint that was given none."""
    return f"step-{step}"


def find_checkpoint(
    folder: Path, *, path: str | None = None, name: str | None = None, step: int | None = None
) -> Path:
    """The checkpoint asked for; without `path`, `name` and `step` the newest complete one.

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
    newest = newest_checkpoint(folder)
    if newest is None:
        raise CheckpointError(f"no complete checkpoint in {folder}; nothing was loaded")
    return newest


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of full state in `folder` with the highest step, if there is one."""
    complete = complete_checkpoints(folder)
    return max(complete, key=lambda path: complete[path], default=None)


def complete_checkpoints(folder: Path) -> dict[Path, int]:
    """The complete checkpoints of full state in `folder`, with their steps.

    Folders that are not complete are skipped with a warning that names them.
    """
    found: dict[Path, int] = {}
    for path in sorted(path for path in folder.glob("*") if path.is_dir()):
        try:
            marker = read_marker(path)
        except CheckpointError as error:
            logger.warning("skipped: %s", error)
            continue
        if not marker.weights_only:
            found[path] = marker.step
    return found


def prune_checkpoints(folder: Path, keep: int) -> list[Path]:
    """Delete all but the `keep` newest complete ones of those named by step; what was deleted.

    Checkpoints that were given a name stay, and so does everything that is not complete.
    """
    steps = complete_checkpoints(folder)
    named_by_step = [path for path in steps if path.name == step_name(steps[path])]
    oldest_first = sorted(named_by_step, key=lambda path: steps[path])
    for path in oldest_first[:-keep]:
        # Without its marker it is incomplete, so that a crash in here leaves nothing half-loadable.
        (path / MARKER).unlink()
        shutil.rmtree(path)
    return oldest_first[:-keep]
