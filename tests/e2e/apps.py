"""An app as its user runs it: a process of its own, its files, its exit code, what it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import SHARED_MEMORY, descendants, shared_memory, wait_until_gone
from tests.waiting import A_HANG_S, wait_until

ROOT = Path(__file__).parent.parent.parent
OWN_SHARED_MEMORY = ["--weights.shared_memory_folder", str(SHARED_MEMORY)]
TINY = ["--config", "configs/grpo_tiny.yaml", *OWN_SHARED_MEMORY]


@dataclass
class RunningApp:
    """A started app. Use `finish` to wait for it and to see that nothing is left."""

    module: str
    arguments: list[str]
    segments: set[str] = field(default_factory=shared_memory)
    seen: set[int] = field(default_factory=set)

    def start(self) -> RunningApp:
        # A session of its own, so that Ctrl-C can be sent to the whole group as a terminal does.
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, *self.arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def wait_for(self, path: Path) -> None:
        """Until `path` has content."""
        self.wait_until(path.name, lambda: path.is_file() and path.stat().st_size > 0)

    def wait_for_processes(self, number: int) -> None:
        """Until the app has started that many others."""
        self.wait_until(f"{number} processes", lambda: len(descendants(self.process.pid)) >= number)

    def wait_until(self, what: str, is_true: Callable[[], bool]) -> None:
        def look() -> bool:
            self._note()
            return self.process.poll() is not None or is_true()

        wait_until(look, what)
        assert self.process.poll() is None, self.process.communicate()

    def _note(self) -> None:
        self.seen |= descendants(self.process.pid)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._note()
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """What schedulers and service managers do: SIGTERM for every process of the run."""
        self._note()
        for pid in [*self.seen, self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def finish(self, timeout_s: float = 4 * A_HANG_S) -> tuple[int, str, str]:
        """Exit code, stdout and stderr. No process and no shared memory is left."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        finally:
            if self.process.poll() is None:
                self._note()
                for pid in [self.process.pid, *self.seen]:
                    os.kill(pid, signal.SIGKILL)
        assert not wait_until_gone(self.seen), "processes are left"
        assert shared_memory() <= self.segments, "shared memory is left"
        return self.process.returncode, out, _without_monarchs_note(err)


def _without_monarchs_note(err: str) -> str:
    """Monarch 0.7.0 says on stderr where it keeps its own log."""
    lines = err.splitlines(keepends=True)
    return "".join(line for line in lines if "Monarch internal logs are being" not in line)


def run_app(module: str, *arguments: str) -> tuple[int, str, str]:
    """Start it and wait; exit code, stdout, stderr."""
    return RunningApp(module, list(arguments)).start().finish()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
