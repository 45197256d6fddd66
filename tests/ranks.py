"""A pool of plain processes that run a function as the ranks of a group, one group after another.

Importing torch and TorchTitan takes most of the time of a test over processes, so many tests
share one pool. Every task joins a process group of its own and leaves it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch.distributed as dist
import torch.multiprocessing as mp

from forge_trainer.engine.checkpoint.together import RankGroup
from forge_trainer.errors import CheckpointError
from tests.waiting import A_HANG_S


class RankPool:
    """`size` processes; use as a context manager."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> RankPool:
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send_bytes(cloudpickle.dumps(None))
        for process in self._processes:
            process.join(timeout=A_HANG_S)
            if process.is_alive():
                process.kill()

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(rank, *args)` on the first `size` processes as one world; results by rank."""
        # Held by this process, so that nobody else gets its port in between.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for pipe in self._pipes[:size]:
            pipe.send_bytes(cloudpickle.dumps((function, args, size, store.port)))
        answers = [pipe.recv() for pipe in self._pipes[:size]]
        del store
        for rank, (result, error) in enumerate(answers):
            if error is not None:
                raise AssertionError(f"rank {rank}: {error}\n(result {result})")
        return [result for result, _ in answers]


def _serve(pipe: Connection, rank: int) -> None:
    import os
    import traceback

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while (task := cloudpickle.loads(pipe.recv_bytes())) is not None:
        function, args, size, port = task
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RANK=str(rank),
            WORLD_SIZE=str(size),
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        try:
            pipe.send((function(rank, *args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


class ThreadGroup(RankGroup):
    """Ranks that are threads of this process; see `thread_groups`."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size = rank, len(values)
        self._values, self._barrier = values, barrier

    def _gather(self, own: tuple[Any, str | None]) -> list[tuple[Any, str | None]]:
        self._values[self.rank] = own
        self._barrier.wait(A_HANG_S)
        outcomes = list(self._values)
        self._barrier.wait(A_HANG_S)
        for _, error in outcomes:
            if error is not None:
                raise CheckpointError(error)
        return outcomes


def thread_groups(size: int) -> list[ThreadGroup]:
    """One group, as each of its ranks sees it."""
    values, barrier = [None] * size, threading.Barrier(size)
    return [ThreadGroup(rank, values, barrier) for rank in range(size)]
