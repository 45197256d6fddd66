"""Checkpoint folders: full state or weights through DCP, or Hugging Face; a marker written last.

A folder without the marker is incomplete and never loaded. Saving goes to a temporary folder
that is renamed, so a fault while saving leaves the earlier checkpoint as it was.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException

from forge_trainer.errors import CheckpointError
from forge_trainer.types import CheckpointInfo, SaveRequest

logger = logging.getLogger(__name__)

HASH_BLOCK_BYTES = 1 << 22
MARKER = "forge_trainer.json"
"""Holds the step and a hash of every file. Present exactly in complete checkpoints."""

T = TypeVar("T")


def save_checkpoint(
    request: SaveRequest, step: int, write: Callable[[Path], None]
) -> CheckpointInfo:
    """Let `write` fill a folder, then hash it, mark it complete and rename it; on every rank.

    Raises:
        CheckpointError: the folder exists already, or cannot be written. On all ranks alike.
    """
    path = Path(request.path)
    partial = path.with_name(path.name + ".partial")
    weights_only = request.weights_only or request.format == "hf"

    def prepare() -> None:
        if path.exists():
            raise CheckpointError(f"{path} exists already; a checkpoint is never overwritten")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def commit() -> None:
        files = {file.name: _hash(file) for file in sorted(partial.iterdir())}
        facts = {"step": step, "format": request.format, "weights_only": weights_only}
        (partial / MARKER).write_text(json.dumps({**facts, "xxh3_128": files}, indent=1))
        os.replace(partial, path)

    with _as_checkpoint_error(f"cannot write {path}"):
        on_first_rank(prepare)
        write(partial)
        on_first_rank(commit)
    return CheckpointInfo(str(path), step, request.format, complete=True, weights_only=weights_only)


def load_checkpoint(state: dict[str, Any], path: Path, *, weights_only: bool) -> CheckpointInfo:
    """Fill the tensors of `state` from the folder `path`; called by every rank.

    Every file is compared with its hash before a tensor is touched.

    Raises:
        CheckpointError: missing, incomplete, damaged, or made by another model. On all ranks alike.
    """
    with _as_checkpoint_error(f"cannot load {path}"):
        marker = on_first_rank(lambda: verify_checkpoint(path))
        if marker["format"] != "dcp":
            raise CheckpointError(
                f"{path} is a Hugging Face directory; start a trainer from it with model.path"
            )
        if marker["weights_only"] and not weights_only:
            raise CheckpointError(f"{path} holds weights only; load it with weights_only=True")
        dcp.load(state, checkpoint_id=path)
    return CheckpointInfo(
        str(path), int(marker["step"]), "dcp", complete=True, weights_only=weights_only
    )


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


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """The marker of the checkpoint at `path`, all of whose files are as they were written.

    Raises:
        CheckpointError: names the file that is missing or has changed.
    """
    marker = _read_marker(path)
    for name, wanted in marker["xxh3_128"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint {path}: {name} is missing")
        if _hash(file) != wanted:
            raise CheckpointError(f"checkpoint {path}: {name} is damaged, its hash differs")
    return marker


def _read_marker(path: Path) -> dict[str, Any]:
    marker = path / MARKER
    if not marker.is_file():
        why = f"lacks {MARKER}, so it is incomplete" if path.is_dir() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {why}")
    try:
        values: dict[str, Any] = json.loads(marker.read_text())
        return {
            "step": int(values["step"]),
            "format": str(values["format"]),
            "weights_only": bool(values["weights_only"]),
            "xxh3_128": dict(values["xxh3_128"]),
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"checkpoint {path}: {MARKER} is damaged: {error!r}") from error


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
            marker = _read_marker(path)
        except CheckpointError as error:
            logger.warning("skipped: %s", error)
            continue
        if not marker["weights_only"]:
            found[path] = int(marker["step"])
    return found


def _hash(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    """DCP's own error is a BaseException; it warns where there is no process group at all."""
    try:
        with warnings.catch_warnings():
            # LocalEngine has no process group on purpose.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {error}") from error


def on_first_rank(work: Callable[[], T]) -> T:
    """What `work` returns or raises on rank 0, on every rank; the others wait for it."""
    if not dist.is_initialized():
        return work()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except CheckpointError as error:
            outcome[1] = str(error)
        except OSError as error:
            outcome[1] = f"{error.strerror}: {error.filename}"
        except Exception as error:
            outcome[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1])
    result: T = outcome[0]
    return result
