"""Of a call that some ranks failed and others did not answer: the error that explains it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
import torch

from forge_trainer.engine.failures import describe, is_collective_failure, is_out_of_memory
from forge_trainer.errors import (
    CollectiveError,
    EngineError,
    ForgeTrainerError,
    WorkerLostError,
)
from forge_trainer.processes import answers as answering
from forge_trainer.processes.answers import Answers
from forge_trainer.processes.patience import Patience
from tests.waiting import A_HANG_S

ERRORS: dict[str, Callable[[], Exception]] = {
    "broken": lambda: CollectiveError("connection closed by peer"),
    "gone": lambda: WorkerLostError("a trainer process is gone"),
    "full": lambda: EngineError("out of memory", rank=7, phase="forward_backward"),
    "refused": lambda: EngineError("the loss failed"),
}


@pytest.fixture(autouse=True)
def _ranks_fail_alike_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "ALIKE_S", 0.05)


def _error_of(method: str, kinds: Sequence[str], aborted: list[int] | None = None) -> Exception:
    """What a call raises whose ranks answer so, one after the other; a silent one never does.

    A rank that `waits` loses its collective once another is told to abort.
    """
    turns = [asyncio.Event() for _ in kinds]
    released = asyncio.Event()

    async def answer(rank: int, kind: str) -> None:
        if rank:
            await turns[rank - 1].wait()
        turns[rank].set()
        if kind == "silent":
            await asyncio.Event().wait()
        if kind == "waits":
            await released.wait()
            raise ERRORS["broken"]()
        if kind != "fine":
            raise ERRORS[kind]()

    async def abort(rank: int) -> None:
        released.set()
        if aborted is not None:
            aborted.append(rank)

    async def never() -> WorkerLostError:
        await asyncio.Event().wait()
        raise AssertionError

    async def call() -> Exception:
        try:
            async with asyncio.timeout(A_HANG_S):
                ranks = [answer(rank, kind) for rank, kind in enumerate(kinds)]
                patience = Patience(1e9, 0.05, 1e9, 1e9)
                await Answers(method, patience, abort=abort, stalled=never).all_of(ranks)
        except ForgeTrainerError as error:
            return error
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


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        (["full", "gone", "gone"], "the mesh is lost: out of memory (rank 7"),
        (["broken", "full", "gone"], "the mesh is lost: out of memory (rank 7"),
        (["full", "gone", "silent"], "the mesh is lost: out of memory (rank 7"),
        (["full", "broken", "fine"], "the mesh is lost: out of memory (rank 7"),
        (["gone", "full"], "a trainer process is gone"),
        (["fine", "refused", "full"], "the loss failed"),
    ],
)
def test_the_first_cause_wins(answers: Sequence[str], wanted: str) -> None:
    """A dead process was the cause always, also of one that NCCL's watchdog had killed because
    another rank was out of memory a minute before."""
    error = _error_of("forward_backward", answers)
    assert str(error).startswith(wanted)
    assert isinstance(error, WorkerLostError) is (wanted != "the loss failed")


def test_a_rank_that_hangs_is_named_by_its_silence() -> None:
    error = _error_of("forward_backward", ["broken", "silent"])
    assert isinstance(error, WorkerLostError)
    assert (error.rank, error.phase) == (1, "forward_backward")
    assert "did not answer" in str(error)


def test_ranks_that_wait_for_one_that_failed_are_released() -> None:
    aborted: list[int] = []
    error = _error_of("forward_backward", ["waits", "full", "fine"], aborted)
    assert str(error).startswith("the mesh is lost: out of memory (rank 7")
    assert isinstance(error, WorkerLostError)
    assert aborted == [1]
    # On NCCL within a host, nobody sees that another has left.
    assert str(_error_of("forward_backward", ["silent", "full"])) == str(error)


def test_ranks_that_fail_alike_are_not_out_of_step() -> None:
    aborted: list[int] = []
    assert not isinstance(_error_of("optim_step", ["full", "full"], aborted), WorkerLostError)
    assert aborted == []


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        torch.distributed.DistBackendError("NCCL error: unhandled cuda error 'out of memory'"),
    ],
)
def test_memory_that_ran_out_is_told_with_numbers_and_what_to_do(error: Exception) -> None:
    text = describe(error, rank=3, phase="forward_backward")
    assert text.startswith("out of memory on rank 3 in forward_backward: ")
    assert (str(error) or "MemoryError") in text
    assert "packing.max_row_tokens" in text
    assert is_out_of_memory(error)
    assert not is_collective_failure(error)


def test_other_errors_are_told_as_they_are() -> None:
    assert describe(ValueError("x"), rank=3, phase="forward") == "ValueError: x"
    assert is_collective_failure(RuntimeError("Connection closed by peer"))
    assert is_collective_failure(torch.distributed.DistBackendError("NCCL error"))
    assert not is_collective_failure(ValueError("gloo"))
