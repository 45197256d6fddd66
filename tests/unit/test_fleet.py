"""Several generators that work as one, over fakes that answer, fail and die when they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forge_trainer.controller.fleet import GeneratorFleet, pulls
from forge_trainer.controller.fleet.members import Members
from forge_trainer.controller.fleet.sending import Homes
from forge_trainer.controller.fleet.watch import HangWatch
from forge_trainer.errors import (
    DataError,
    EngineError,
    ForgeTrainerError,
    TornWeightsError,
    WeightsError,
    WorkerLostError,
)
from forge_trainer.pieces import StoreAddress, WeightsRef, WeightsVersion
from forge_trainer.processes.generators import Generators
from forge_trainer.types import Completion, SamplingParams
from tests.unit.fleet_fakes import FakeGenerator, request
from tests.waiting import A_HANG_S, until

V1, V2 = WeightsVersion(0, 1), WeightsVersion(0, 2)


class Fleet:
    """A fleet over fakes, and what was asked of it."""

    def __init__(self, size: int, slots: int, request_timeout_s: float) -> None:
        self.fakes = [FakeGenerator(f"generator/{i}") for i in range(size)]
        self.fleet = GeneratorFleet(
            {fake.name: fake for fake in self.fakes},
            slots=slots,
            request_timeout_s=request_timeout_s,
        )
        self.outcomes: dict[str, list[str | Exception]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str, tokens: int = 10, group: str = "") -> None:
        """Send requests; returns once each of them is somewhere."""
        for name in names:
            self.outcomes[name] = []
            self.tasks[name] = asyncio.create_task(self._ask(name, tokens, group))
        await settled()

    async def _ask(self, name: str, tokens: int, group: str) -> None:
        try:
            answer = await self.fleet.generate_one(request(name, tokens=tokens, group=group))
            self.outcomes[name].append(answer.text)
        except ForgeTrainerError as error:
            self.outcomes[name].append(error)

    async def outcome(self, name: str) -> str | Exception:
        """The only one."""
        await self.tasks[name]
        (outcome,) = self.outcomes[name]
        return outcome

    def where(self, name: str) -> list[int]:
        """Who was asked, in that order for two."""
        return [i for i, fake in enumerate(self.fakes) for asked in fake.asked if asked == name]


async def settled() -> None:
    """Everything that can go on without an answer has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def running(
    size: int = 2, *, slots: int = 8, request_timeout_s: float = A_HANG_S
) -> AsyncIterator[Fleet]:
    fleet = Fleet(size, slots, request_timeout_s)
    try:
        yield fleet
    finally:
        for task in fleet.tasks.values():
            task.cancel()
        for fake in fleet.fakes:
            fake.is_deaf = False
            fake.fail_all(EngineError("the test is over"))
        await fleet.fleet.close()


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test on a loop of its own, which has a limit that only a hang reaches."""

    async def limited() -> None:
        async with asyncio.timeout(A_HANG_S):
            await test()

    def run() -> None:
        asyncio.run(limited())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@on_loop
async def test_a_request_goes_to_the_replica_with_the_fewest_tokens_to_do() -> None:
    async with running(3) as fleet:
        await fleet.ask("long", tokens=30)
        await fleet.ask("a", "b", "c", "d")
        assert [fleet.where(name) for name in ("long", "a", "b", "c", "d")] == [
            [0],
            [1],
            [2],
            [1],
            [2],
        ]
        fleet.fakes[0].answer("long")
        assert await fleet.outcome("long") == "generator/0:long"
        await fleet.ask("e")
        assert fleet.where("e") == [0]


@on_loop
async def test_a_group_stays_where_its_prefix_is_until_that_replica_leads_by_a_quarter() -> None:
    """8 slots: a lead of two requests is nothing, a lead of three is too much."""
    async with running(2, slots=8) as fleet:
        await fleet.ask("0", "1", "2", group="g")
        assert [fleet.where(name) for name in "012"] == [[0], [0], [0]]
        await fleet.ask("3", "4", "5", group="g")
        assert [fleet.where(name) for name in "345"] == [[1], [1], [1]]
        # Requests of no group, and of others, go where there is less to do.
        await fleet.ask("6")
        await fleet.ask("7", group="h")
        assert sorted([*fleet.where("6"), *fleet.where("7")]) == [0, 1]


@on_loop
async def test_a_group_moves_when_its_replica_is_gone() -> None:
    async with running(2) as fleet:
        await fleet.ask("0", group="g")
        fleet.fakes[0].die()
        await settled()
        await fleet.ask("1", group="g")
        assert (fleet.where("0"), fleet.where("1")) == ([0, 1], [1])


def test_homes_are_forgotten_in_the_order_of_their_last_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forge_trainer.controller.fleet.sending.MAX_HOMES", 2)
    first, second = Members({"a": FakeGenerator("a"), "b": FakeGenerator("b")}).all
    homes = Homes(slots=100)

    def pick(group: str) -> Any:
        return homes.pick([first, second], group=group, tokens=1)

    assert pick("g") is first
    first.load = 5
    assert pick("h") is second
    assert pick("g") is first, "it has its home"
    assert pick("i") is second
    second.load = 9
    assert pick("g") is first
    assert pick("h") is first, "its home, the second, is forgotten"


@on_loop
async def test_requests_of_a_dead_replica_are_sent_again_once() -> None:
    async with running(3) as fleet:
        names = [str(i) for i in range(6)]
        await fleet.ask(*names)
        assert sorted(fleet.fakes[0].asked) == ["0", "3"]
        fleet.fakes[0].die()
        await settled()
        for fake in fleet.fakes[1:]:
            for name in list(fake.open):
                fake.answer(name)
        outcomes = [await fleet.outcome(name) for name in names]
        assert all(isinstance(outcome, str) for outcome in outcomes)
        assert [len(fleet.where(name)) for name in names] == [2, 1, 1, 2, 1, 1]
        assert list(fleet.fleet.replicas) == ["generator/1", "generator/2"]


@on_loop
async def test_a_hung_replica_is_taken_out_and_what_it_answers_later_is_dropped() -> None:
    async with running(2, request_timeout_s=0.2) as fleet:
        hung, other = fleet.fakes
        hung.is_deaf = True
        await fleet.ask("a", "b")
        assert list(hung.open) == ["a"]

        def steps() -> bool:
            other.num_steps += 1
            return "a" in other.open

        await until(steps, "the hung one's request with the other")
        hung.answer("a")
        await settled()
        assert fleet.outcomes["a"] == []
        other.answer("a")
        other.answer("b")
        assert await fleet.outcome("a") == "generator/1:a"
        assert await fleet.outcome("b") == "generator/1:b"
        status = await fleet.fleet.get_status()
        assert [replica.state for replica in status.replicas] == ["lost", "serving"]
        assert "generator/0 hangs: it has taken no step" in str(status.replicas[0].reason)


@on_loop
async def test_only_a_replica_that_does_nothing_at_all_hangs() -> None:
    """Looks at three that are slow, paused and stuck, on a clock of the test's own."""
    fakes = [FakeGenerator(name) for name in ("slow", "paused", "stuck", "pulling", "idle")]
    members, now = Members({fake.name: fake for fake in fakes}), [0.0]
    slow, paused, stuck, pulling, _ = members.all
    watch = HangWatch(members, limit_s=10.0, clock=lambda: now[0])
    paused.is_paused = True
    fakes[3].hold_pull()
    calls = [r.generator.generate_one(request(r.name)) for r in (slow, paused, stuck)]
    asked: list[asyncio.Task[Any]] = [
        asyncio.create_task(replica.ask(call, tokens=1))
        for replica, call in zip((slow, paused, stuck), calls, strict=True)
    ]
    asked.append(asyncio.create_task(pulling.ask(pulling.generator.pull_weights(V1))))
    await settled()
    for second in range(10):
        now[0] = second
        fakes[0].num_steps += 1
        await watch.look()
    assert len(members.living) == 5
    now[0] = 10.0
    await watch.look()
    assert [replica.name for replica in members.all if replica.lost] == ["slow", "stuck"][1:]
    with pytest.raises(WorkerLostError, match="stuck hangs: .* for 10 s, and is in phase generate"):
        await asked[2]
    for task in asked:
        task.cancel()


@on_loop
async def test_a_replica_that_was_idle_is_not_late_with_its_first_request() -> None:
    fake, now = FakeGenerator("one"), [0.0]
    members = Members({"one": fake})
    watch = HangWatch(members, limit_s=10.0, clock=lambda: now[0])
    await watch.look()
    now[0] = 1000.0
    asked = asyncio.create_task(members.all[0].ask(fake.generate_one(request("a")), tokens=1))
    await settled()
    for now[0] in (1000.0, 1009.0):
        await watch.look()
    assert members.living
    fake.answer("a")
    await asked
    # Another one takes its place between two looks: that is progress.
    asked = asyncio.create_task(members.all[0].ask(fake.generate_one(request("b")), tokens=1))
    await settled()
    for now[0] in (1011.0, 1020.0):
        await watch.look()
    assert members.living
    now[0] = 1021.0
    await watch.look()
    assert not members.living
    with pytest.raises(WorkerLostError):
        await asked


@on_loop
async def test_a_second_failure_is_the_callers() -> None:
    async with running(3) as fleet:
        await fleet.ask("a")
        fleet.fakes[0].die()
        await settled()
        second = fleet.where("a")[1]
        fleet.fakes[second].die()
        error = await fleet.outcome("a")
        assert isinstance(error, WorkerLostError)
        assert error.message == f"a generator/{second} process is gone"
        assert isinstance(error.__cause__, WorkerLostError)
        assert "generator/0" in str(error.__cause__)
        assert len(fleet.where("a")) == 2
        await fleet.ask("b")
        (last,) = fleet.where("b")
        fleet.fakes[last].answer("b")
        assert await fleet.outcome("b") == f"generator/{last}:b"


@on_loop
async def test_the_end_of_all_names_the_first_cause() -> None:
    async with running(2) as fleet:
        await fleet.ask("a", "b")
        fleet.fakes[1].die()
        await settled()
        fleet.fakes[0].die()
        for name in "ab":
            error = await fleet.outcome(name)
            assert isinstance(error, WorkerLostError)
            assert error.message == (
                "all 2 generators are lost, the first by: a generator/1 process is gone"
            )
        with pytest.raises(WorkerLostError, match="the first by: a generator/1"):
            await fleet.fleet.pull_weights(V1)
        with pytest.raises(WorkerLostError, match="the first by: a generator/1"):
            await fleet.fleet.get_status()


@on_loop
async def test_one_alone_speaks_for_itself() -> None:
    async with running(1) as fleet:
        await fleet.ask("a", "b")
        fleet.fakes[0].fail("a", EngineError("a step failed"))
        assert str(await fleet.outcome("a")) == "a step failed"
        assert fleet.where("a") == [0]
        fleet.fakes[0].die()
        assert "a generator/0 process is gone" in str(await fleet.outcome("b"))


@on_loop
async def test_a_request_at_fault_is_not_sent_again() -> None:
    async with running(2) as fleet:
        await fleet.ask("a")
        fleet.fakes[0].fail("a", DataError("a prompt has no tokens"))
        assert isinstance(await fleet.outcome("a"), DataError)
        assert fleet.where("a") == [0]
        assert len(fleet.fleet.replicas) == 2


@on_loop
async def test_a_replica_whose_steps_only_fail_is_taken_out() -> None:
    """It has nothing to do, so it would be asked for everything. A step fails all that run."""
    async with running(2) as fleet:
        bad, good = fleet.fakes
        await fleet.ask("a", "b", "c", "d")
        bad.fail_all(EngineError("device-side assert"))
        await settled()
        assert len(good.open) == 4
        assert len(fleet.fleet.replicas) == 2, "one step has failed, not two"
        for step in range(2):
            assert len(fleet.fleet.replicas) == 2
            await fleet.ask(f"{step}")
            assert f"{step}" in bad.open
            bad.fail_all(EngineError("device-side assert"))
            await settled()
        assert list(fleet.fleet.replicas) == ["generator/1"]
        status = await fleet.fleet.get_status()
        reason = status.replicas[0].reason
        assert reason == "generator/0 failed 3 times in a row: device-side assert"
        assert len(good.open) == 6


@on_loop
async def test_a_completion_forgives_errors() -> None:
    async with running(2) as fleet:
        bad = fleet.fakes[0]
        for step in range(4):
            await fleet.ask(f"fails{step}")
            assert f"fails{step}" in bad.open
            bad.fail_all(EngineError("out of memory"))
            await settled()
            await fleet.ask(f"works{step}")
            bad.answer(f"works{step}")
            await fleet.outcome(f"works{step}")
        assert len(fleet.fleet.replicas) == 2


@on_loop
async def test_a_cancelled_caller_takes_its_request_back() -> None:
    async with running(2) as fleet:
        await fleet.ask("a", "b")
        fleet.tasks["a"].cancel()
        await settled()
        assert fleet.fakes[0].cancelled == ["a"]
        assert fleet.outcomes["a"] == []
        # What it would have cost is forgotten, too.
        await fleet.ask("c")
        assert fleet.where("c") == [0]


@on_loop
async def test_one_that_cannot_pull_is_not_asked_until_it_has_caught_up() -> None:
    async with running(2) as fleet:
        late = fleet.fakes[0]
        late.pulls.append(WeightsError("a checksum is wrong"))
        held = late.hold_pull()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(pulls, "RETRY_S", 0.0)
            assert await fleet.fleet.pull_weights(V1) == V1
            await fleet.ask("a", "b")
            assert [fleet.where(name) for name in "ab"] == [[1], [1]]
            status = await fleet.fleet.get_status()
            assert status.version == V1
            assert [one.state for one in status.replicas] == ["behind", "serving"]
            assert status.replicas[0].reason == "a checksum is wrong"
            await until(lambda: len(late.pulled) == 2, "another try")
        held.set_result(None)
        await settled()
        await fleet.ask("c")
        assert fleet.where("c") == [0]


@on_loop
async def test_a_slow_one_holds_up_nobody_and_then_catches_up_at_once() -> None:
    """While it pulls the first version, others are at the third: it skips the second."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pulls, "LAGGARD_S", 0.01)
        async with running(2) as fleet:
            slow, _ = fleet.fakes
            held = slow.hold_pull()
            await fleet.ask("before")
            assert fleet.where("before") == [0]
            for version in (V1, V2, WeightsVersion(0, 3)):
                assert await fleet.fleet.pull_weights(version) == version
            await fleet.ask("a", "b")
            assert [fleet.where(name) for name in "ab"] == [[1], [1]]
            assert slow.pulled == [V1]
            held.set_result(None)
            await settled()
            assert slow.pulled == [V1, WeightsVersion(0, 3)]
            slow.answer("before")
            assert await fleet.outcome("before") == "generator/0:before"
            await fleet.ask("c")
            assert fleet.where("c") == [0]


@on_loop
async def test_a_pull_fails_only_if_nobody_got_it() -> None:
    async with running(2) as fleet:
        for number, fake in enumerate(fleet.fakes):
            fake.pulls.append(WeightsError(f"torn {number}"))
        with pytest.raises(WeightsError, match="torn 0"):
            await fleet.fleet.pull_weights(V1)
        await fleet.ask("a", "b")
        assert [fleet.where(name) for name in "ab"] == [[0], [1]], "on the old weights, as before"
        fleet.fakes[0].die()
        assert await fleet.fleet.pull_weights(V2) == V2
        assert list(fleet.fleet.replicas) == ["generator/1"]


@on_loop
async def test_of_the_newest_everybody_gets_the_newest() -> None:
    """One asked before a push, and one after it."""
    async with running(2) as fleet:
        early, late = fleet.fakes
        early.newest, late.newest = V1, V2
        ref = WeightsRef(V1, 1, 4, "float32", "memory")
        assert await fleet.fleet.pull_weights(ref) == V1
        assert await fleet.fleet.pull_weights() == V2
        await settled()
        assert early.version == V2


@on_loop
async def test_requests_wait_for_one_that_is_on_its_way_and_for_nothing_else() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pulls, "LAGGARD_S", 0.01)
        patched.setattr(pulls, "RETRY_S", 0.0)
        async with running(2) as fleet:
            slow, quick = fleet.fakes
            held = slow.hold_pull()
            await fleet.fleet.pull_weights(V1)
            await fleet.ask("a")
            quick.die()
            await settled()
            assert fleet.where("a") == [1]
            held.set_result(None)
            await settled()
            assert fleet.where("a") == [0, 1]
            slow.answer("a")
            assert await fleet.outcome("a") == "generator/0:a"

        async with running(2) as fleet:
            broken, quick = fleet.fakes
            broken.pull_error = WeightsError("no such file")
            await fleet.fleet.pull_weights(V1)
            await until(lambda: len(broken.pulled) >= 3, "three tries")
            await fleet.ask("a")
            quick.die()
            error = await fleet.outcome("a")
            assert isinstance(error, WeightsError)
            assert "generator/0: no such file" in str(error)


@on_loop
async def test_torn_weights_are_told_until_a_pull_succeeds() -> None:
    async with running(1) as fleet:
        (fake,) = fleet.fakes
        fake.pulls.append(TornWeightsError("half of it is copied"))
        with pytest.raises(TornWeightsError):
            await fleet.fleet.pull_weights(V1)
        await fleet.ask("a")
        assert "half of it is copied" in str(await fleet.outcome("a"))
        await fleet.fleet.pull_weights(V1)
        await fleet.ask("b")
        fake.answer("b")
        assert await fleet.outcome("b") == "generator/0:b"


@on_loop
async def test_a_pull_leaves_requests_in_flight_alone() -> None:
    async with running(2) as fleet:
        await fleet.ask("a", "b")
        await fleet.fleet.pull_weights(V1)
        for fake in fleet.fakes:
            assert fake.cancelled == []
            fake.answer(*fake.open)
        assert [await fleet.outcome(name) for name in "ab"] == ["generator/0:a", "generator/1:b"]


SAMPLING = SamplingParams(max_completion_tokens=4, num_completions=2)


@on_loop
async def test_prompts_are_spread_and_come_back_in_their_order() -> None:
    async with running(2) as fleet:
        asked = asyncio.create_task(fleet.fleet.generate(list("abcde"), SAMPLING))
        await settled()
        assert [fake.asked for fake in fleet.fakes] == [["a,b,c"], ["d,e"]]
        fleet.fakes[1].answer("d,e")
        fleet.fakes[0].die()
        await settled()
        fleet.fakes[1].answer("a,b,c")
        groups: list[list[Completion]] = await asked
        assert [[one.text for one in group] for group in groups] == [
            [f"generator/1:{prompt}"] * 2 for prompt in "abcde"
        ]
        assert await fleet.fleet.generate([], SAMPLING) == []


@on_loop
async def test_pause_resume_and_close_reach_all_that_are_left() -> None:
    async with running(3) as fleet:
        fleet.fakes[0].die()
        await fleet.fleet.pause()
        assert [fake.is_paused for fake in fleet.fakes] == [False, True, True]
        assert len(fleet.fleet.replicas) == 2
        await fleet.fleet.resume()
        assert not any(fake.is_paused for fake in fleet.fakes)
        assert (await fleet.fleet.read_weight("w")).item() == 1.0
        assert (await fleet.fleet.weight_checksums()).version == WeightsVersion(0, 0)
    assert [fake.is_closed for fake in fleet.fakes] == [False, True, True]
    with pytest.raises(EngineError, match="the generators are closed"):
        await fleet.fleet.generate_one(request("late"))
    await fleet.fleet.close()


@on_loop
async def test_a_status_has_sums_and_every_replica() -> None:
    async with running(2) as fleet:
        await fleet.ask("a", "b", "c")
        fleet.fakes[0].num_steps, fleet.fakes[1].num_steps = 3, 4
        status = await fleet.fleet.get_status()
        assert (status.num_running, status.num_steps, status.phase) == (3, 7, "generate")
        assert [(one.name, one.num_open) for one in status.replicas] == [
            ("generator/0", 2),
            ("generator/1", 1),
        ]


class _Handle(FakeGenerator):
    """What a new store is opened in."""

    address: StoreAddress | None = None

    async def open_store(self, address: StoreAddress) -> None:
        self._require_living()
        self.address = address


@on_loop
async def test_a_new_store_is_for_those_that_are_left() -> None:
    """A store that is replaced finds a generator that is gone and one that nobody misses yet."""
    handles: Any = {f"generator/{i}": _Handle(f"generator/{i}") for i in range(3)}
    fleet = GeneratorFleet(handles, slots=1, request_timeout_s=A_HANG_S)
    gone, unnoticed, _ = handles.values()
    gone.die()
    await fleet.pull_weights(V1)
    unnoticed.die()
    address = StoreAddress("torchstore", "second")
    await Generators(handles, fleet).open_store(address)
    assert [one.address for one in handles.values()] == [None, None, address]
    await fleet.pull_weights(V2)
    await fleet.close()
