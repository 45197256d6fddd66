"""Of a call that some ranks failed and others did not answer: the error that explains it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from forge_trainer.config import TrainerConfig
from forge_trainer.errors import (
    CollectiveError,
    EngineError,
    ForgeTrainerError,
    WorkerLostError,
)
from forge_trainer.processes.handles import MeshRanks
from tests.waiting import A_HANG_S

ERRORS: dict[str, Callable[[], Exception]] = {
    "broken": lambda: CollectiveError("connection closed by peer"),
    "gone": lambda: WorkerLostError("a trainer process is gone"),
    "full": lambda: EngineError("out of memory"),
}


def _error_of(method: str, answers: Sequence[str]) -> Exception:
    """What a call raises whose ranks answer so; a silent one never does."""
    ranks = MeshRanks.__new__(MeshRanks)
    ranks._config = TrainerConfig(collective_timeout_s=1.0, checkpoint_timeout_s=1e9)

    async def answer(kind: str) -> None:
        if kind == "silent":
            await asyncio.Event().wait()
        raise ERRORS[kind]()

    async def call() -> Exception:
        tasks = [asyncio.create_task(answer(kind)) for kind in answers]
        try:
            async with asyncio.timeout(A_HANG_S):
                await ranks._all_or_first_cause(tasks, method)
        except ForgeTrainerError as error:
            return error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise AssertionError("it raised nothing")

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("method", "answers", "wanted"),
    [
        ("setup", ["silent", "full"], "out of memory"),
        ("setup", ["silent", "silent", "gone"], "process is gone"),
        ("setup", ["broken", "gone", "silent"], "process is gone"),
        ("forward_backward", ["silent", "silent", "gone"], "process is gone"),
        ("forward_backward", ["broken", "silent", "gone"], "process is gone"),
    ],
)
def test_who_failed_is_named_and_not_who_waits_for_it(
    method: str, answers: Sequence[str], wanted: str
) -> None:
    """In setup, ranks may be half an hour apart, so a failure of one was told after as long."""
    assert wanted in str(_error_of(method, answers))


def test_a_rank_that_hangs_is_named_by_its_silence() -> None:
    error = _error_of("forward_backward", ["broken", "silent"])
    assert isinstance(error, WorkerLostError)
    assert (error.rank, error.phase) == (1, "forward_backward")
    assert "did not answer" in str(error)
