"""Workers on machines that `ssh` reaches: Monarch's SSHJob, watched while it starts them.

SSHJob of Monarch 0.7.0 looks at no `ssh` that it has started, throws away what one says, and leaves
the workers behind when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO, NoReturn

from monarch._src.job.job import ProcessState, SSHJob
from monarch._src.job.service_identity import service_proc_addr

from forge_trainer.errors import ConfigError

LOOK_EVERY_S = 0.1
LAST_WORDS_BYTES = 2000
END_TIMEOUT_S = 5.0
KEEP, END = b"k", b"e"
WORKER = (
    "import os, threading; "
    "stays = lambda: os.read(0, 1) == b'k' and os.read(0, 1) == b''; "
    "threading.Thread(target=lambda: stays() or os._exit(1), daemon=True).start(); "
    "from monarch.actor import run_worker_loop_forever; "
    "run_worker_loop_forever(address={address!r}, ca='trust_all_connections')"
)
"""Ends when its standard input does, which is when `ssh` or the controller is gone. Once told that
it is kept, it ends when told to: later a connection may break, and guards watch it."""


class WatchedSshJob(SSHJob):
    """Hosts that end when `ssh` does, until they are kept."""

    def __init__(self, python: str, port: int, log_folder: Path | None) -> None:
        """What `ssh` and workers say goes to a file per host in `log_folder`."""
        super().__init__(python_exe=python, monarch_port=port)
        self._log_folder = log_folder
        self._started: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}

    def _start_host(self, host: str) -> ProcessState:
        """As in SSHJob, with another worker, and no questions asked that nobody answers."""
        identity = self._service_proc_ids_by_host[host]
        address = service_proc_addr(f"tcp://{host}:{self._port}", identity)
        code = WORKER.format(address=address)
        command = f"{shlex.quote(self._python_exe)} -c {shlex.quote(code)}"
        output = self._open_log(host)
        process = subprocess.Popen(
            ["ssh", "-o", "BatchMode=yes", host, command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._started[host] = process, output
        return ProcessState(process.pid, address)

    def _open_log(self, host: str) -> IO[bytes]:
        if self._log_folder is None:
            return tempfile.TemporaryFile()
        self._log_folder.mkdir(parents=True, exist_ok=True)
        return (self._log_folder / f"ssh-{host}.log").open("w+b")

    async def watch(self) -> NoReturn:
        """Raises ConfigError once an `ssh` has ended: so has its worker, or there was none."""
        while True:
            for host, (process, output) in self._started.items():
                if (code := process.poll()) is not None:
                    raise ConfigError(
                        f"launch.addresses: `ssh {host}` ended with code {code} before its worker "
                        f"answered: {_last_words(output)}"
                    )
            await asyncio.sleep(LOOK_EVERY_S)

    def keep_workers(self) -> None:
        """From now on, they stay if a connection breaks."""
        for process, _ in self._started.values():
            _tell(process, KEEP)

    def _kill(self) -> None:
        """Also workers that Monarch's shutdown has left, as it does if another host is lost."""
        for process, _ in self._started.values():
            _tell(process, END)
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        end = time.monotonic() + END_TIMEOUT_S
        for process, output in self._started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
            process.wait()
            output.close()
        self._started.clear()


def _tell(process: subprocess.Popen[bytes], word: bytes) -> None:
    assert process.stdin is not None
    # One that is gone is found to be lost by whoever needs it.
    with contextlib.suppress(OSError):
        process.stdin.write(word)
        process.stdin.flush()


def _last_words(output: IO[bytes]) -> str:
    # Not moving the place at which others write.
    size = os.fstat(output.fileno()).st_size
    end = os.pread(output.fileno(), LAST_WORDS_BYTES, max(0, size - LAST_WORDS_BYTES))
    return end.decode(errors="replace").strip() or "it said nothing"
