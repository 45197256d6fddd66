"""One rank's part in saving and loading: DCP or a Hugging Face export, made complete at the end.

Saving goes to a temporary folder that is renamed once every file has its hash in the marker, so
a fault while saving leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from forge_trainer.errors import CheckpointError
from forge_trainer.types import CheckpointInfo, SaveRequest

from .files import (
    Marker,
    files_in,
    flush_to_disk,
    hash_file,
    partial_folder,
    read_marker,
    verify_files,
    write_marker,
)
from .parts import is_read_by, load_parts, needed_files, require_same_model, save_parts
from .random_state import random_state, set_random_state
from .staging import Staging, State
from .together import RankGroup

RANDOM = "random"
"""Key of the random states by rank."""


class Checkpointer:
    """Saves and loads for one rank; every method but `wait` is a collective of its group.

    A save with `request.wait` false returns once the state is copied. The files are then written
    on a thread of this object, one save at a time: the next save or load waits for it.
    """

    def __init__(self, group: RankGroup, device: torch.device, *, layout: str) -> None:
        self._group = group
        self._layout = f"{device.type} {layout}"
        self._device = device
        self._staging = Staging(device)
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="checkpoint", initializer=self._use_device
        )
        self._running: Future[CheckpointInfo] | None = None

    def save(self, request: SaveRequest, step: int, state: State) -> CheckpointInfo:
        """Write `state` through DCP, now or beside what comes next; full state with the random one.

        Raises:
            CheckpointError: the folder exists already, or cannot be written. On all ranks alike.
        """
        self._settle()
        partial = self._prepare(request)
        if request.is_full:
            state = {**state, RANDOM: self._random_state()}
        if request.wait:
            return self._finish(
                request, step, partial, lambda: save_parts(state, partial, self._group)
            )
        copies: list[State] = []
        # Together, so that a rank without memory for its copy keeps the others from writing.
        with self._removing_after_errors(partial):
            self._group.on_each(lambda: copies.append(self._staging.copy(state)))
        self._running = self._thread.submit(
            self._finish,
            request,
            step,
            partial,
            lambda: save_parts(copies[0], partial, self._group),
        )
        return CheckpointInfo(
            request.path, step, request.format, complete=False, weights_only=request.weights_only
        )

    def export(
        self, request: SaveRequest, step: int, write: Callable[[Path], set[str]]
    ) -> CheckpointInfo:
        """Let `write` fill the folder with a Hugging Face model and say which files it wrote.

        See `save` for errors.
        """
        self._settle()
        partial = self._prepare(request)
        return self._finish(request, step, partial, lambda: write(partial))

    def wait(self) -> CheckpointInfo | None:
        """What became of the last save that did not wait; None if there was none.

        May be called on any thread, beside everything else.

        Raises:
            CheckpointError: it failed.
        """
        return None if self._running is None else self._running.result()

    def load(self, path: Path, state: State, *, weights_only: bool) -> CheckpointInfo:
        """Fill `state` from the folder `path`: its tensors in place, other values in the dict.

        Files are compared with their hashes, tensors by name and shape with those of the model,
        before one is touched. Random state goes back to the ranks that it came from, if their
        layout is the same.

        Raises:
            CheckpointError: missing, incomplete, damaged, or made by another model. On all ranks
                alike.
        """
        self._settle()
        with _as_checkpoint_error(f"cannot load {path}"):
            marker = self._verified_marker(path, weights_only=weights_only)
            if marker.format != "dcp":
                raise CheckpointError(
                    f"{path} is a Hugging Face directory; start a trainer from it with model.path"
                )
            if marker.weights_only and not weights_only:
                raise CheckpointError(f"{path} holds weights only; load it with weights_only=True")
            require_same_model(path, state, self._group)
            random = {}
            if not weights_only and marker.layout == self._layout:
                random = {RANDOM: self._random_state()}
            loaded = {**state, **random}
            load_parts(loaded, path, self._group)
        if random:
            set_random_state(loaded.pop(RANDOM)[str(self._group.rank)], self._device)
        state.update(loaded)
        return CheckpointInfo(
            str(path), marker.step, "dcp", complete=True, weights_only=weights_only
        )

    def close(self) -> None:
        """Wait for a running save, and free its copy of the state."""
        self._thread.shutdown(wait=True)
        self._staging.close()

    def _use_device(self) -> None:
        # Otherwise DCP takes the stream of GPU 0, and every rank opens a context there.
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_device(self._device)

    def _random_state(self) -> State:
        return {str(self._group.rank): random_state(self._device)}

    def _settle(self) -> None:
        """No save runs any more; what became of it is for `wait` to tell."""
        if self._running is not None:
            self._running.exception()

    def _prepare(self, request: SaveRequest) -> Path:
        """An empty folder to write to."""
        path = Path(request.path)
        with _as_checkpoint_error(f"cannot write {path}"):
            return self._group.on_first(lambda: partial_folder(path))

    def _finish(
        self, request: SaveRequest, step: int, partial: Path, write: Callable[[], set[str]]
    ) -> CheckpointInfo:
        """Write the files, hash them, mark the folder complete, and give it its name.

        `write` says which files this rank wrote, and this rank hashes them: they are in its page
        cache. Those that nobody claims are the first rank's.
        """
        path = Path(request.path)
        weights_only = not request.is_full

        def hash_own() -> dict[str, str]:
            for name in own:
                flush_to_disk(partial / name)
            return {name: hash_file(partial / name) for name in own}

        def commit() -> None:
            marker = Marker(step, request.format, weights_only, self._layout, time.time(), hashes)
            write_marker(partial, marker)
            os.replace(partial, path)
            flush_to_disk(path.parent)

        with self._removing_after_errors(partial), _as_checkpoint_error(f"cannot write {path}"):
            own = write()
            claimed = set().union(*self._group.on_each(lambda: own))
            seen = self._group.on_first(lambda: files_in(partial))
            if unseen := sorted(claimed - seen):
                raise CheckpointError(
                    f"the first rank does not see {unseen[0]}, which another one wrote: "
                    f"{path.parent} must lie on storage that all hosts share"
                )
            if self._group.rank == 0:
                own |= seen - claimed
            parts = self._group.on_each(hash_own)
            hashes = {name: value for part in parts for name, value in sorted(part.items())}
            self._group.on_first(commit)
        return CheckpointInfo(
            str(path), step, request.format, complete=True, weights_only=weights_only
        )

    @contextlib.contextmanager
    def _removing_after_errors(self, partial: Path) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            if self._group.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _verified_marker(self, path: Path, *, weights_only: bool) -> Marker:
        marker = self._group.on_first(lambda: read_marker(path))
        needed = needed_files(marker.xxh3_128, weights_only=weights_only)
        own = [name for name in needed if is_read_by(name, self._group)]
        self._group.on_each(lambda: verify_files(path, marker, own))
        return marker


@contextlib.contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    """DCP's own error is a BaseException."""
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Without the tracebacks of every rank that DCP makes its text of."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
