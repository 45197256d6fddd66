"""Full training state through torch.distributed.checkpoint (DCP), with a marker written last.

A folder without the marker is incomplete and never loaded. Saving goes to a temporary folder
that is renamed, so a fault while saving leaves the earlier checkpoint as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from forge_trainer.errors import CheckpointError
from forge_trainer.types import CheckpointInfo

MARKER = "forge_trainer.json"
"""Holds the step. Present exactly in complete checkpoints."""


def save_checkpoint(state: dict[str, Any], path: Path, step: int) -> CheckpointInfo:
    """Write `state` to the folder `path`; called by every rank.

    Raises:
        CheckpointError: the folder exists already, or cannot be written.
    """
    if path.exists():
        raise CheckpointError(f"{path} exists already; a checkpoint is never overwritten")
    partial = path.with_name(path.name + ".partial")
    try:
        if _is_first_rank():
            shutil.rmtree(partial, ignore_errors=True)
            partial.parent.mkdir(parents=True, exist_ok=True)
        _barrier()
        with _no_warning_about_a_single_process():
            dcp.save(state, checkpoint_id=partial)
        _barrier()
        if _is_first_rank():
            (partial / MARKER).write_text(json.dumps({"step": step}))
            os.replace(partial, path)
        _barrier()
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
    return CheckpointInfo(path=str(path), step=step, format="dcp", complete=True)


def load_checkpoint(state: dict[str, Any], path: Path) -> CheckpointInfo:
    """Fill the tensors of `state` from the folder `path`; called by every rank.

    Raises:
        CheckpointError: missing, incomplete, or made by another model.
    """
    step = read_step(path)
    try:
        with _no_warning_about_a_single_process():
            dcp.load(state, checkpoint_id=path)
    except Exception as error:
        raise CheckpointError(f"cannot load {path}: {type(error).__name__}: {error}") from error
    return CheckpointInfo(path=str(path), step=step, format="dcp", complete=True)


def read_step(path: Path) -> int:
    """The step of a complete checkpoint.

    Raises:
        CheckpointError: there is none at `path`.
    """
    marker = path / MARKER
    if not marker.is_file():
        why = f"lacks {MARKER}, so it is incomplete" if path.is_dir() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {why}")
    return int(json.loads(marker.read_text())["step"])


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
    """The complete checkpoint in `folder` with the highest step; None if there is none."""
    complete = [path for path in folder.glob("*") if (path / MARKER).is_file()]
    return max(complete, key=read_step, default=None)


@contextlib.contextmanager
def _no_warning_about_a_single_process() -> Iterator[None]:
    """DCP warns where there is no process group; LocalEngine has none on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
