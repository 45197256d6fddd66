"""The replay's slots and its bound on staleness; the pipeline and the rollout loop around it."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_trainer.errors import EngineError, RolloutError
from forge_trainer.replay import Replay
from forge_trainer.run.pipeline import Pipeline
from forge_trainer.run.rollout import run_rollout
from forge_trainer.tasks import run_with_background
from forge_trainer.types import Episode, Prompt
from tests.unit.test_small_functions import episode
from tests.waiting import A_HANG_S


def group(version: int, *rewards: float, group_id: int = 0) -> list[Episode]:
    return [episode(r, version=version, group_id=group_id) for r in rewards or (0.0, 1.0)]


def admitted(replay: Replay, number: int) -> list[int]:
    indices = [replay.admit() for _ in range(number)]
    assert None not in indices
    return [index for index in indices if index is not None]


def numbers(replay: Replay, policy_version: int = 0) -> list[int] | None:
    batch = replay.take(policy_version)
    return None if batch is None else [g[0].group_id for g in batch.groups]


def test_without_staleness_a_batch_is_all_that_was_admitted_in_its_order() -> None:
    replay = Replay(groups_per_step=3)
    assert admitted(replay, 3) == [0, 1, 2]
    assert replay.admit() is None
    for index in (2, 0, 1):
        assert replay.take(0) is None
        replay.add(index, group(0, group_id=index))
    assert numbers(replay) == [0, 1, 2]
    assert replay.admit() is None, "its weights have not arrived"
    replay.release()
    assert admitted(replay, 3) == [3, 4, 5]


def test_training_looks_past_what_is_not_finished_as_far_as_the_window_goes() -> None:
    """S = 1, P = 4: 8 slots, and a window of floor(0.3 * 8) = 2 groups."""
    replay = Replay(groups_per_step=4, max_staleness=1)
    admitted(replay, 8)
    for index in (1, 3, 4, 5, 6, 7):
        replay.add(index, group(0, group_id=index))
    # 1 may overtake 0, and nothing else may.
    assert (replay.take(0), replay.num_finished, replay.num_sampling) == (None, 6, 2)
    replay.add(0, group(0, group_id=0))
    # Now 2 is the oldest, and 3 may overtake it.
    assert (replay.take(0), replay.num_finished) == (None, 7)
    replay.add(2, group(0, group_id=2))
    assert numbers(replay) == [0, 1, 2, 3]
    assert numbers(replay) == [4, 5, 6, 7]


def test_a_discarded_group_frees_its_slot_and_is_forgotten() -> None:
    replay = Replay(groups_per_step=1)
    (index,) = admitted(replay, 1)
    replay.discard(index)
    replay.add(index, group(0))
    assert (replay.num_finished, replay.admit()) == (0, 1)


def test_replacements_are_bounded_per_batch() -> None:
    replay = Replay(groups_per_step=1, max_replaced=2)
    assert [replay.may_replace() for _ in range(3)] == [True, True, False]
    (index,) = admitted(replay, 1)
    replay.add(index, group(0))
    assert replay.take(0) is not None
    assert (replay.may_replace(), replay.num_replaced) == (True, 3)


def test_the_last_of_what_was_oversampled_are_given_up() -> None:
    replay = Replay(groups_per_step=2, oversampled=2)
    admitted(replay, 4)
    for index in (3, 1, 2):
        replay.add(index, group(0, group_id=index))
    batch = replay.take(0)
    assert batch is not None
    assert [g[0].group_id for g in batch.groups] == [1, 2]
    assert (batch.abandoned, replay.num_abandoned, replay.num_finished) == ([0], 2, 0)
    replay.add(0, group(0))
    assert replay.num_finished == 0


def test_what_is_too_old_or_ahead_is_dropped_and_counted() -> None:
    """Ahead: training has gone back to a checkpoint. A group is as old as its oldest episode."""
    replay = Replay(groups_per_step=1, max_staleness=1)
    assert replay.max_age == 1
    for versions in [(5, 3), (6, 6), (5, 4)]:
        (index,) = admitted(replay, 1)
        replay.add(index, [episode(0.0, version=v, group_id=index) for v in versions])
        taken = numbers(replay, policy_version=5)
        if taken is not None:
            replay.release()
    assert (taken, replay.num_dropped) == ([2], 2)


def test_a_replay_continues_from_its_saved_state() -> None:
    """What was being sampled is not part of it: 1 and 4 have to be asked for again."""

    def filled() -> Replay:
        replay = Replay(groups_per_step=2, max_staleness=2)
        admitted(replay, 6)
        for index in (0, 2, 3, 5):
            replay.add(index, group(0, group_id=index))
        return replay

    straight, saved = filled(), filled()
    resumed = Replay(groups_per_step=2, max_staleness=2)
    resumed.load_state_dict(saved.state_dict())
    assert numbers(straight) is None
    straight.discard(1)
    assert numbers(resumed) == numbers(straight) == [0, 2]
    assert resumed.num_finished == straight.num_finished == 2
    assert resumed.admit() == 6


@settings(max_examples=150, deadline=None)
@given(
    S=st.integers(0, 3),
    P=st.integers(1, 7),
    updates=st.integers(1, 3),
    oversampled=st.integers(0, 2),
    seed=st.integers(0, 10**6),
)
def test_no_schedule_makes_a_token_older_than_the_bound(
    S: int, P: int, updates: int, oversampled: int, seed: int
) -> None:
    """Once a group was overtaken again and again, by whatever was next to it.

    Random orders of finishing, losses, replacements, slow weights and late training: age stays
    within the bound, nothing is dropped for its age, and no group is trained on twice or lost.

    The version of a group is that of the weights that had arrived when it was admitted, the oldest
    that any of its tokens can have.
    """
    rng = random.Random(seed)
    replay = Replay(
        groups_per_step=P,
        max_staleness=S,
        updates_per_batch=updates,
        oversampled=oversampled,
        max_replaced=2,
    )
    if S and not oversampled:
        window = max(1, math.floor(0.3 * (S + 1) * P))
        assert replay.max_age == (S + math.ceil((window - 1) / P)) * updates
    running: dict[int, int] = {}
    trained: list[int] = []
    gone: set[int] = set()
    step = arrived = untold = 0
    while step < 12 * updates:
        event = rng.choice(["admit"] * 3 + ["finish"] * 3 + ["lose", "take", "arrive"])
        if event == "admit" and (index := replay.admit()) is not None:
            running[index] = arrived
        elif event == "finish" and running:
            index = rng.choice(list(running))
            replay.add(index, group(running.pop(index), group_id=index))
        elif event == "lose" and running and rng.random() < 0.2:
            index = rng.choice(list(running))
            del running[index]
            replay.discard(index)
            gone.add(index)
        elif event == "take" and (batch := replay.take(step)) is not None:
            ages = [step - g[0].policy_version for g in batch.groups]
            assert max(ages) <= replay.max_age
            trained += [g[0].group_id for g in batch.groups]
            gone |= set(batch.abandoned)
            for index in batch.abandoned:
                del running[index]
            step, untold = step + updates, untold + 1
        elif event == "arrive" and untold:
            arrived, untold = arrived + updates, untold - 1
            replay.release()
    assert replay.num_dropped == 0
    assert len(set(trained)) == len(trained) == 12 * P
    if not oversampled:
        known = set(trained) | gone | set(running) | set(replay.state_dict()["picked"])
        known |= set(replay.state_dict()["waiting"])
        assert known == set(range(max(known) + 1))


def prompts() -> Iterator[Prompt]:
    return (Prompt(text=str(number), answer="") for number in itertools.count())


def _run(pipeline: Pipeline, sample: object, steps: int, source: Iterator[Prompt]) -> list[int]:
    """Both loops; the numbers of the groups that were trained on, in their order."""
    trained: list[int] = []

    async def training() -> None:
        for step in range(steps):
            batch = await pipeline.take()
            if batch is None:
                return
            trained.extend(g[0].group_id for g in batch.groups)
            pipeline.finish_batch(step=step + 1)
            await pipeline.release_batch()

    async def scenario() -> None:
        async with asyncio.timeout(A_HANG_S):
            rollout = run_rollout(source, sample, pipeline)  # type: ignore[arg-type]
            await run_with_background(training(), rollout)

    asyncio.run(scenario())
    return trained


def test_prompts_are_sampled_in_their_order_side_by_side() -> None:
    together: list[int] = []
    running = 0

    async def sample(prompt: Prompt, index: int) -> Sequence[Episode]:
        nonlocal running
        assert prompt.text == str(index)
        running += 1
        together.append(running)
        await asyncio.sleep(0)
        running -= 1
        return group(index // 3, group_id=index)

    assert _run(Pipeline(Replay(groups_per_step=3)), sample, 2, prompts()) == list(range(6))
    assert max(together) == 3


def test_groups_without_signal_or_episodes_are_replaced() -> None:
    async def sample(prompt: Prompt, index: int) -> Sequence[Episode] | None:
        if index == 0:
            return None
        return group(0, *([1.0, 1.0] if index in (1, 2) else [0.0, 1.0]), group_id=index)

    pipeline = Pipeline(Replay(groups_per_step=3, max_replaced=1))
    assert _run(pipeline, sample, 1, prompts()) == [2, 3, 4]
    assert pipeline.replay.num_replaced == 1


def test_the_end_of_the_prompts_ends_training() -> None:
    """Seven prompts make two batches of three; nobody waits for a third."""

    async def sample(prompt: Prompt, index: int) -> Sequence[Episode]:
        await asyncio.sleep(0)
        return group(index // 3, group_id=index)

    source = itertools.islice(prompts(), 7)
    trained = _run(Pipeline(Replay(groups_per_step=3)), sample, 9, source)
    assert trained == list(range(6))


def test_an_error_of_one_group_ends_the_run_with_it() -> None:
    async def sample(prompt: Prompt, index: int) -> Sequence[Episode]:
        if index == 1:
            raise EngineError("no more paper")
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(EngineError, match="no more paper"):
        _run(Pipeline(Replay(groups_per_step=2)), sample, 1, prompts())


def test_what_is_given_up_is_cancelled() -> None:
    cancelled: list[int] = []

    async def sample(prompt: Prompt, index: int) -> Sequence[Episode]:
        if index == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(index)
                raise
        return group(index // 3, group_id=index)

    pipeline = Pipeline(Replay(groups_per_step=2, oversampled=1))
    assert _run(pipeline, sample, 1, prompts()) == [0, 2]
    assert cancelled == [1]


def test_what_was_oversampled_is_given_up_whoever_is_late() -> None:
    """Two replaced groups once made the window end before the fifth that was finished."""
    replay = Replay(groups_per_step=4, oversampled=2)
    admitted(replay, 6)
    for index in (1, 2):
        replay.discard(index)
    assert admitted(replay, 2) == [6, 7]
    for index in (3, 4, 5, 6):
        replay.add(index, group(0, group_id=index))
    batch = replay.take(0)
    assert batch is not None
    assert [g[0].group_id for g in batch.groups] == [3, 4, 5, 6]
    assert batch.abandoned == [0, 7]
    replay.release()
    assert len(admitted(replay, 6)) == 6


def test_nothing_is_sampled_after_the_last_batch() -> None:
    """One that failed beside the last save once took the run's checkpoint with it."""
    begun: list[int] = []

    async def sample(prompt: Prompt, index: int) -> Sequence[Episode]:
        begun.append(index)
        if index >= 2:
            await asyncio.Event().wait()
        return group(0, group_id=index)

    pipeline = Pipeline(Replay(groups_per_step=2, max_staleness=1))

    async def scenario() -> None:
        async with asyncio.timeout(A_HANG_S), asyncio.TaskGroup() as both:
            rollout = both.create_task(run_rollout(prompts(), sample, pipeline))
            assert await pipeline.take() is not None
            await pipeline.stop()
            await pipeline.release_batch()
            await rollout

    asyncio.run(scenario())
    assert max(begun) <= 3


def test_a_group_that_cancels_itself_is_an_error_and_no_hang() -> None:
    async def sample(prompt: Prompt, index: int) -> Sequence[Episode]:
        raise asyncio.CancelledError

    with pytest.raises(RolloutError, match="group 0 cancelled itself"):
        _run(Pipeline(Replay(groups_per_step=1)), sample, 1, prompts())
