"""What processes a test left behind, found by parentage and never by name."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from forge_trainer.weights.shared_memory.folder import default_root
from tests.waiting import A_HANG_S


def descendants(root: int | None = None) -> set[int]:
    """Ids of all living processes that descend from `root` (default: this one)."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    found = {root or os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root or os.getpid()}


def is_alive(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] != "Z"


def wait_until_gone(pids: set[int]) -> set[int]:
    """The processes that do not go."""
    end = time.monotonic() + A_HANG_S
    while (left := {pid for pid in pids if is_alive(pid)}) and time.monotonic() < end:
        time.sleep(0.05)
    return left


SHARED_MEMORY = default_root() / f"forge_trainer_tests-{os.getpid()}-{secrets.token_hex(4)}"
"""Where this process's tests have their shared memory, and nobody else has."""


def shared_memory() -> set[str]:
    """Names in this suite's shared memory."""
    return {entry.name for entry in SHARED_MEMORY.iterdir()}
