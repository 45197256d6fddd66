"""Calls that hang on all ranks at once, and how long which call may take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from forge_trainer.config import TrainerConfig
from forge_trainer.errors import WorkerLostError
from forge_trainer.functional.columns import Columns
from forge_trainer.functional.packing import PackedRows
from forge_trainer.processes.answers import Answers
from forge_trainer.processes.patience import CallLimits, Patience
from forge_trainer.processes.stalls import LOOKS, StallWatch
from forge_trainer.status import EngineFacts, Progress, RankStatus
from tests.waiting import A_HANG_S

LIMIT_S = 0.2


def _status(idle_s: float, microbatch: int = 3) -> RankStatus:
    return RankStatus(4, "forward_backward", 999.0, idle_s, microbatch, 8, 0, 0, None)


class Mesh:
    """Ranks that say what they are told to; None never answers."""

    def __init__(self, *says: Callable[[], RankStatus] | None, limit_s: float = LIMIT_S) -> None:
        self.says = list(says)
        self.limit_s = limit_s
        self.num_looks = 0

    async def status(self, rank: int) -> RankStatus:
        self.num_looks += rank == 0
        says = self.says[rank]
        if says is None:
            await asyncio.Event().wait()
        assert says is not None
        return says()

    async def stalled(self) -> WorkerLostError:
        async with asyncio.timeout(A_HANG_S):
            return await StallWatch(
                "forward_backward", num_ranks=len(self.says), ask=self.status, limit_s=self.limit_s
            ).stalled()


def test_a_hang_of_all_ranks_tells_what_each_was_doing() -> None:
    mesh = Mesh(lambda: _status(612.0), None, lambda: _status(700.0, microbatch=0))
    error = asyncio.run(mesh.stalled())
    text = str(error)
    assert text.startswith("no rank made progress for 0 s: rank 0: forward_backward, microbatch 3")
    assert "microbatch 3 of 8, 0 s; rank 1: has not answered for 0 s; rank 2: forward_b" in text
    assert "raise trainer.stall_timeout_s" in text
    assert (error.rank, error.phase, error.step) == (1, "forward_backward", 4)


def test_one_rank_that_makes_progress_keeps_a_call_going() -> None:
    """Also if others wait for it for longer than the limit, as in a pipeline."""
    began = time.monotonic()
    mesh = Mesh(lambda: _status(999.0), lambda: _status(0.0))

    async def watch() -> None:
        watching = asyncio.create_task(mesh.stalled())
        while mesh.num_looks < 3 * LOOKS:
            await asyncio.sleep(0)
            assert not watching.done()
        mesh.says[1] = mesh.says[0]
        await watching

    asyncio.run(watch())
    assert time.monotonic() - began > LIMIT_S


def test_what_was_before_the_call_is_no_stall() -> None:
    """A trainer may have been idle for an hour when a call begins."""
    mesh = Mesh(lambda: _status(3600.0))
    began = time.monotonic()
    asyncio.run(mesh.stalled())
    assert time.monotonic() - began >= LIMIT_S
    assert mesh.num_looks <= LOOKS + 1


def test_a_rank_that_answers_late_is_seen_again() -> None:
    mesh = Mesh(None, limit_s=1.0)

    async def watch() -> None:
        watching = asyncio.create_task(mesh.stalled())
        while mesh.num_looks < 1:
            await asyncio.sleep(0)
        mesh.says[0] = lambda: _status(0.0)
        while mesh.num_looks < LOOKS + 3:
            await asyncio.sleep(0)
            assert not watching.done()
        watching.cancel()

    asyncio.run(watch())


def test_a_call_without_any_answer_is_given_up_when_it_stalls() -> None:
    gone = WorkerLostError("no rank made progress")

    async def never(*_: int) -> None:
        await asyncio.Event().wait()

    async def stalled() -> WorkerLostError:
        return gone

    patience = Patience(1e9, 1e9, 1e9, 1e9)
    answers = Answers("forward", patience, abort=never, stalled=stalled)
    with pytest.raises(WorkerLostError) as caught:
        asyncio.run(answers.all_of([never(), never()]))
    assert caught.value is gone


def test_progress_counts_microbatches() -> None:
    progress = Progress()
    seen = []
    for batch in progress.over(["a", "b"]):
        progress.ticked_at = -1.0
        seen.append((batch, progress.microbatch, progress.num_microbatches))
    assert seen == [("a", 1, 2), ("b", 2, 2)]
    assert progress.ticked_at > 0
    progress.begin()
    assert (progress.microbatch, progress.num_microbatches) == (0, 0)


def _rows(height: int) -> PackedRows:
    none, columns = np.zeros(0, dtype=np.int64), Columns.empty(0, {})
    return PackedRows((1, height, 8), none, none, none, none.astype(np.float32), columns)


def _apart(limits: CallLimits, *calls: tuple[str, Sequence[object]]) -> list[float]:
    """How long ranks may be apart in these calls, one after the other."""
    granted = []
    for method, args in calls:
        granted.append(limits.of(method, args).apart_s)
        limits.note(method, args, [])
    return granted


def test_first_calls_of_a_kind_may_compile() -> None:
    config = TrainerConfig(collective_timeout_s=60, init_timeout_s=600, checkpoint_timeout_s=1800)
    passes = [(m, [_rows(2)]) for m in ("forward", "forward_backward", "forward_backward")]
    others: list[tuple[str, Sequence[object]]] = [("optim_step", []), ("optim_step", [])]
    files: list[tuple[str, Sequence[object]]] = [("save", []), ("clear_gradients", [])]
    granted = _apart(CallLimits(config), *passes, *others, *files)
    assert granted == [600, 600, 60, 600, 60, 1800, 60]


def test_a_first_call_that_failed_may_compile_again() -> None:
    limits = CallLimits(TrainerConfig())
    assert limits.of("forward", []).apart_s == limits.of("forward", []).apart_s == 600


@pytest.mark.parametrize("compiles", ["config", "cuda"])
def test_where_shapes_are_compiled_another_shape_is_a_first_call(compiles: str) -> None:
    limits = CallLimits(TrainerConfig(compile=["model"] if compiles == "config" else []))
    if compiles == "cuda":
        facts = EngineFacts("qwen3", 8, 8, 8, 0, 1, {}, True, "cuda:0")
        limits.note("setup", [], [facts])
    calls = [("forward", [_rows(height)]) for height in (2, 2, 3, 3, 2)]
    assert _apart(limits, *calls) == [600, 60, 600, 60, 60]


def test_limits_fit_into_each_other() -> None:
    """Collectives break before the controller gives up, and a stall is no shorter than either."""
    limits = CallLimits(TrainerConfig(stall_timeout_s=700, collective_timeout_s=60))
    first = limits.of("forward", [])
    limits.note("forward", [], [])
    later, saving = limits.of("forward", []), limits.of("save", [])
    assert first == Patience(apart_s=600, explain_s=15, stall_s=700, collective_s=585)
    assert later == Patience(apart_s=60, explain_s=15, stall_s=700, collective_s=45)
    assert saving == Patience(apart_s=1800, explain_s=15, stall_s=1800, collective_s=45)
