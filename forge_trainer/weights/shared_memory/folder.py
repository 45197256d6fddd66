"""The folder of a run's weights in shared memory, and who may remove it.

Every process that publishes, and the controller, hold a shared lock on the folder's lock file as
long as they live. A folder whose lock can be had alone belongs to nobody any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from forge_trainer.errors import ConfigError, WeightsError

logger = logging.getLogger(__name__)

LOCK = "lock"
MANIFESTS, LEASES, SEGMENTS = "manifests", "leases", "segments"
NEW = ".new-"
UNLOCKED_AGE_S = 600.0
"""A folder in the making that is older was left by a process that died."""


def default_root() -> Path:
    """Where shared memory is mounted, or a folder for temporary files."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


@contextlib.contextmanager
def shared_folder(root: Path | None = None) -> Iterator[Path]:
    """A folder for one run's weights, removed at the end; orphans of this user go first.

    Raises:
        ConfigError: `root` is not a folder that can be written.
    """
    root = root or default_root()
    clean_orphans(root)
    name = f"{_prefix()}{secrets.token_hex(6)}"
    new = root / f"{NEW}{name}"
    try:
        new.mkdir(mode=0o700)
        for part in (MANIFESTS, LEASES, SEGMENTS):
            (new / part).mkdir()
        lock = hold(new)
        folder = new.rename(root / name)
    except OSError as error:
        raise ConfigError(
            f"weights.shared_memory_folder: cannot make a folder in {root}: {error.strerror}"
        ) from error
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def hold(folder: Path) -> int:
    """Keep the folder from being taken for an orphan until the returned descriptor is closed.

    Raises:
        WeightsError: the folder is gone.
    """
    try:
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise WeightsError(f"the shared-memory folder {folder} is gone: {error}") from error
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def clean_orphans(root: Path) -> list[Path]:
    """Remove the folders of this user's runs that have no living process; which they were."""
    removed = []
    for folder in [*root.glob(f"{_prefix()}*"), *root.glob(f"{NEW}{_prefix()}*")]:
        # Another run may be cleaning, too.
        with contextlib.suppress(OSError):
            if _is_own(folder) and _is_orphan(folder):
                _remove(folder)
                removed.append(folder)
    for folder in removed:
        logger.info("removed %s, weights in shared memory of a run that is gone", folder)
    return removed


def _remove(folder: Path) -> None:
    """The lock goes last: a folder that is removed in part can still be told for an orphan."""
    for part in (SEGMENTS, MANIFESTS, LEASES):
        shutil.rmtree(folder / part, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _prefix() -> str:
    return f"forge_trainer-{os.getuid()}-"


def _is_own(folder: Path) -> bool:
    # Not a link: it could lead anywhere.
    return not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.getuid()


def _is_orphan(folder: Path) -> bool:
    try:
        is_free = can_lock(folder / LOCK, fcntl.LOCK_EX)
        if not folder.name.startswith(NEW):
            return is_free
    except FileNotFoundError:
        is_free = True
    # In the making, or a process died while it made or removed it.
    return is_free and time.time() - folder.stat().st_mtime > UNLOCKED_AGE_S


def can_lock(path: Path, kind: int) -> bool:
    """True if nobody holds a lock that excludes this kind (`fcntl.LOCK_EX`, `LOCK_SH`).

    Raises:
        FileNotFoundError: there is no such file.
    """
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        return True
    finally:
        os.close(lock)
