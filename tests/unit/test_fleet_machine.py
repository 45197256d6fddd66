"""A fleet in random histories of answers, failures, deaths, hangs, pulls and cancellations."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forge_trainer.controller.fleet import GeneratorFleet, pulls
from forge_trainer.errors import (
    DataError,
    EngineError,
    ForgeTrainerError,
    WeightsError,
    WorkerLostError,
)
from forge_trainer.pieces import WeightsVersion
from forge_trainer.types import Completion
from tests.unit.fleet_fakes import FakeGenerator, request
from tests.waiting import A_HANG_S

INDEX = st.integers(0, 2**16)


class FleetMachine(RuleBasedStateMachine):
    """Every request gets exactly one outcome, whatever happens, and is sent twice at most."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.outcomes: dict[str, list[Completion | Exception]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.faulty: set[str] = set()
        self.gone: set[str] = set()
        """Who died or was found hanging."""
        self.runner.get_loop().set_exception_handler(self._note_problem)
        self.problems: list[dict[str, Any]] = []
        self.cancelled: set[str] = set()
        self.promised = WeightsVersion(0, 0)
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(pulls, "RETRY_S", 0.0)

    @initialize(size=st.integers(1, 4), slots=st.integers(1, 8))
    def begin(self, size: int, slots: int) -> None:
        self.fakes = [FakeGenerator(f"generator/{i}") for i in range(size)]
        by_name = {fake.name: fake for fake in self.fakes}
        # Hangs are found by a look that the machine makes itself.
        self.fleet = GeneratorFleet(by_name, slots=slots, request_timeout_s=A_HANG_S)
        for fake in self.fakes:
            self._note_who_is_asked(fake)

    def _note_who_is_asked(self, fake: FakeGenerator) -> None:
        generate_one = fake.generate_one

        async def noted(request: Any) -> Completion:
            assert fake.version >= self.promised, "it runs on older weights than promised"
            return await generate_one(request)

        fake.generate_one = noted  # type: ignore[method-assign]

    def _note_problem(self, loop: object, context: dict[str, Any]) -> None:
        self.problems.append(context)

    def _settle(self) -> None:
        async def settle() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        self.runner.run(settle())

    @rule(tokens=st.integers(2, 40), group=st.sampled_from(["", "g", "h"]))
    def ask(self, tokens: int, group: str) -> None:
        name = str(len(self.tasks))
        self.outcomes[name] = []

        async def send() -> None:
            try:
                answer = await self.fleet.generate_one(request(name, tokens=tokens, group=group))
                who, _, asked = answer.text.rpartition(":")
                assert asked == name
                assert who not in self.gone, "it answers too late"
                self.outcomes[name].append(answer)
            except ForgeTrainerError as error:
                self.outcomes[name].append(error)

        async def begin() -> None:
            self.tasks[name] = asyncio.create_task(send())

        self.runner.run(begin())
        self._settle()

    def _any_open(self, index: int) -> tuple[FakeGenerator, str] | None:
        """A request that a generator has not answered, perhaps one that nobody waits for."""
        held = [
            (fake, name)
            for fake in self.fakes
            for name, future in fake.open.items()
            if not future.done()
        ]
        return held[index % len(held)] if held else None

    @rule(index=INDEX)
    def answer(self, index: int) -> None:
        if found := self._any_open(index):
            fake, name = found
            fake.answer(name)
            self._settle()

    @rule(index=INDEX)
    def find_fault(self, index: int) -> None:
        if found := self._any_open(index):
            fake, name = found
            if not fake.is_deaf:
                self.faulty.add(name)
            fake.fail(name, DataError("at fault"))
            self._settle()

    @rule(index=INDEX)
    def fail_a_step(self, index: int) -> None:
        self.fakes[index % len(self.fakes)].fail_all(EngineError("a step failed"))
        self._settle()

    @rule(index=INDEX)
    def die(self, index: int) -> None:
        fake = self.fakes[index % len(self.fakes)]
        if not fake.is_deaf:
            self.gone.add(fake.name)
            fake.die()
            self._settle()

    @rule(index=INDEX)
    def hang(self, index: int) -> None:
        """It is deaf from now on, and the watch says so; it may still answer later."""
        fake = self.fakes[index % len(self.fakes)]
        members = self.fleet._members
        (replica,) = [one for one in members.all if one.generator is fake]
        fake.is_deaf = True
        self.gone.add(fake.name)
        error = WorkerLostError(f"{fake.name} hangs")
        self.runner.run(_now(lambda: members.take_out(replica, error)))
        self._settle()

    @rule(index=INDEX)
    def cancel(self, index: int) -> None:
        waiting = [name for name, task in self.tasks.items() if not task.done()]
        if waiting:
            name = waiting[index % len(waiting)]
            self.cancelled.add(name)
            self.tasks[name].cancel()
            self._settle()

    @rule(index=INDEX, works=st.booleans())
    def let_pulls_work(self, index: int, works: bool) -> None:
        error = None if works else WeightsError("a checksum is wrong")
        self.fakes[index % len(self.fakes)].pull_error = error
        self._settle()

    @rule()
    @precondition(lambda self: self.promised.policy_version < 8)
    def pull(self) -> None:
        wanted = WeightsVersion(0, self.promised.policy_version + 1)
        able = [fake for fake in self.fakes if not (fake.lost or fake.is_deaf or fake.pull_error)]
        if able:
            self.promised = self.runner.run(self.fleet.pull_weights(wanted))
            assert self.promised == wanted
        else:
            with pytest.raises((WeightsError, WorkerLostError)):
                self.runner.run(self.fleet.pull_weights(wanted))

    @invariant()
    def a_request_has_one_outcome_at_most(self) -> None:
        for name, outcomes in self.outcomes.items():
            assert len(outcomes) <= 1
            done = name in self.tasks and self.tasks[name].done()
            assert done == (len(outcomes) == 1 or (done and name in self.cancelled))

    @invariant()
    def a_request_is_sent_twice_at_most_and_once_if_it_is_at_fault(self) -> None:
        for name in self.outcomes:
            times = sum(fake.asked.count(name) for fake in self.fakes)
            assert times <= 2
            if name in self.faulty:
                assert isinstance(self.outcomes[name][-1], DataError)

    def teardown(self) -> None:
        """Those who live answer all they have: then nothing is left open."""
        for _ in range(3):
            for fake in self.fakes:
                fake.pull_error = None
                for name, future in list(fake.open.items()):
                    if not future.done():
                        fake.answer(name)
            self._settle()
        assert all(task.done() for task in self.tasks.values()), "somebody waits for ever"
        for replica in self.fleet._members.all:
            assert (replica.load, replica.num_open) == (0, 0)
        for fake in self.fakes:
            fake.lost = None
        self.runner.run(self.fleet.close())
        assert self.problems == []
        self.runner.close()
        self.patched.undo()


async def _now(work: Any) -> None:
    """On the loop."""
    work()


FleetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestFleetMachine = FleetMachine.TestCase
