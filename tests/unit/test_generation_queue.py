"""Who gets a slot when, and what callers hear, over a backend that counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from forge_trainer.config import GeneratorConfig
from forge_trainer.errors import DataError, EngineError, ForgeTrainerError, WorkerLostError
from forge_trainer.generation import ModelGenerator
from forge_trainer.generation.desk import RequestDesk
from forge_trainer.pieces import TensorFacts, WeightsVersion
from forge_trainer.processes.generator_handle import RequestMail
from forge_trainer.types import Completion, GenerationRequest
from tests.generators import request
from tests.waiting import Gate, until


class CountingBackend:
    """A request ends after `max_completion_tokens` steps; its tokens are the steps' numbers."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.running: dict[str, list[int]] = {}
        self.requests: dict[str, GenerationRequest] = {}
        self.joined: list[int] = []
        """Requests that joined at each step."""
        self.gate: Gate | None = None
        self.is_closed = False

    def load(self) -> None: ...

    def encode(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]

    def check(self, request: GenerationRequest) -> None:
        if not len(request.token_ids):
            raise DataError("no tokens")

    def add(self, request: GenerationRequest) -> None:
        if request.seed == 666:
            raise ValueError("a number that it does not like")
        self.running[request.id] = []
        self.requests[request.id] = request

    def cancel(self, request_id: str) -> None:
        self.running.pop(request_id, None)

    def step(self) -> list[tuple[str, Completion]]:
        if self.gate is not None:
            self.gate.pass_through()
        self.joined.append(sum(not tokens for tokens in self.running.values()))
        ended = []
        for request_id, tokens in list(self.running.items()):
            tokens.append(len(self.joined))
            asked = self.requests[request_id]
            if len(tokens) == asked.sampling.max_completion_tokens:
                zeros = [0] * len(tokens)
                ids = self.running.pop(request_id)
                done = Completion(asked.token_ids, ids, zeros, zeros, "", 1.0, "length")
                ended.append((request_id, done))
        return ended

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def use_weights(self, version: WeightsVersion, *, keep_cache: bool) -> None: ...

    def checksums(self) -> dict[str, TensorFacts]:
        return {}

    def read_weight(self, name: str) -> Tensor:
        return self.tensors[name]

    def close(self) -> None:
        self.is_closed = True


def _generator(backend: CountingBackend, slots: int = 4) -> ModelGenerator:
    return ModelGenerator(backend, GeneratorConfig(batch_size=slots))


async def _all(generator: ModelGenerator, requests: Sequence[GenerationRequest]) -> list[Any]:
    asked = [generator.generate_one(one) for one in requests]
    return await asyncio.gather(*asked, return_exceptions=True)


def test_what_is_asked_for_in_one_turn_of_the_loop_joins_at_one_step() -> None:
    backend = CountingBackend()
    asyncio.run(_all(_generator(backend, slots=64), [request(seed=s) for s in range(50)]))
    assert backend.joined == [50] + [0] * 7


def test_slots_are_refilled_an_eighth_at_a_time() -> None:
    """Each refill is a pass over prompts. 16 slots, one free at every step: two join together."""
    backend = CountingBackend()
    lengths = [*range(1, 17), *[40] * 16]
    requests = [request(max_completion_tokens=length) for length in lengths]
    asyncio.run(_all(_generator(backend, slots=16), requests))
    assert backend.joined[:7] == [16, 0, 2, 0, 2, 0, 2]
    assert sum(backend.joined) == 32


def test_the_last_that_wait_get_what_is_free() -> None:
    backend = CountingBackend()
    requests = [request(max_completion_tokens=n, seed=n) for n in (1, 9, 9, 9, 9, 9, 9, 9, 2)]
    asyncio.run(_all(_generator(backend, slots=8), requests))
    assert backend.joined[:2] == [8, 1]


def test_one_that_the_backend_refuses_ends_alone() -> None:
    outcomes = asyncio.run(
        _all(_generator(CountingBackend()), [request(seed=s) for s in (1, 666, 3)])
    )
    assert [type(one) for one in outcomes] == [Completion, EngineError, Completion]
    assert "a number that it does not like" in str(outcomes[1])


def test_closing_answers_everybody() -> None:
    """Four run and two wait; who comes later is told, too."""
    backend = CountingBackend()

    async def close_half_way() -> list[Any]:
        generator = _generator(backend)
        backend.gate = Gate()
        asked = [asyncio.create_task(generator.generate_one(request(seed=s))) for s in range(6)]
        await backend.gate.reached()
        closing = asyncio.create_task(generator.close())
        await asyncio.sleep(0)
        backend.gate.open()
        await closing
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        with pytest.raises(EngineError, match="the generator is closed"):
            await generator.generate_one(request())
        return outcomes

    outcomes = asyncio.run(close_half_way())
    assert [type(one) for one in outcomes] == [EngineError] * 6
    assert "closed while 6 requests were open" in str(outcomes[0])
    assert backend.is_closed
    assert not backend.running


def test_a_group_that_fails_leaves_nothing_behind() -> None:
    backend = CountingBackend()

    async def ask() -> None:
        generator = _generator(backend)
        sampling = request(num_completions=3).sampling
        with pytest.raises(DataError, match="no tokens: ''"):
            await generator.generate(["abc", ""], sampling)
        backend.gate = Gate()
        asked = asyncio.create_task(generator.generate(["abc", "d"], sampling))
        await backend.gate.reached()
        asked.cancel()
        backend.gate.open()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await until(lambda: not backend.running, "nothing that runs")
        status = await generator.get_status()
        assert (status.num_running, status.num_waiting) == (0, 0)
        await generator.close()

    asyncio.run(ask())


def test_the_same_calls_have_the_same_seeds() -> None:
    backend = CountingBackend()

    async def seeds(generator: ModelGenerator) -> list[int]:
        backend.requests.clear()
        await generator.generate(["a", "b"], request(num_completions=2).sampling)
        return [one.seed for one in backend.requests.values()]

    async def ask() -> None:
        generator = _generator(backend)
        await generator.setup()
        first, second = await seeds(generator), await seeds(generator)
        assert len({*first, *second}) == 8
        await generator.setup()
        assert await seeds(generator) == first

    asyncio.run(ask())


def test_a_desk_hands_out_what_has_ended_and_waits_for_the_first() -> None:
    async def work() -> None:
        answers: dict[str, asyncio.Future[Completion]] = {}

        def begin(asked: GenerationRequest) -> asyncio.Future[Completion]:
            if asked.seed == 666:
                raise DataError("refused")
            answers[asked.id] = asyncio.get_running_loop().create_future()
            return answers[asked.id]

        desk = RequestDesk(begin)
        assert await desk.collect() == []
        requests = [request(seed=seed) for seed in (0, 1, 2, 3, 666)]
        ids = [one.id for one in requests]
        desk.submit(requests)
        ((refused, error),) = await desk.collect()
        assert (refused, str(error)) == (ids[4], "refused")
        collecting = asyncio.create_task(desk.collect())
        await asyncio.sleep(0)
        done = Completion([1], [2], [0.0], [0], "", 1.0, "length")
        answers[ids[0]].set_result(done)
        answers[ids[2]].set_exception(EngineError("failed"))
        assert [one for one, _ in await collecting] == [ids[0], ids[2]]
        collecting = asyncio.create_task(desk.collect())
        await asyncio.sleep(0)
        desk.submit([], withdrawn=[ids[1], ids[3], "nobody's"])
        assert await collecting == []
        assert answers[ids[1]].cancelled()

    asyncio.run(work())


class Desk:
    """The other side of the mail: it notes messages, and ends what it is told to."""

    def __init__(self) -> None:
        self.messages: list[tuple[list[int], int]] = []
        """(seeds, how many were withdrawn)"""
        self.open: list[str] = []
        self.ended: asyncio.Queue[Any] = asyncio.Queue()
        self.error: Exception | None = None

    async def submit(self, requests: Sequence[GenerationRequest], withdrawn: Sequence[str]) -> None:
        self.messages.append(([one.seed for one in requests], len(withdrawn)))
        self.open += [one.id for one in requests]
        if self.error is not None:
            raise self.error

    async def collect(self) -> Any:
        outcome = await self.ended.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def end(self, number: int) -> None:
        ended, self.open = self.open[:number], self.open[number:]
        done = Completion([1], [2], [0.0], [0], "", 1.0, "length")
        self.ended.put_nowait([(request_id, done) for request_id in ended])


def _asked(mail: RequestMail, number: int) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(mail.answer(request(seed=seed))) for seed in range(number)]


def test_requests_of_one_turn_leave_in_one_message() -> None:
    async def work() -> None:
        desk = Desk()
        mail = RequestMail(desk.submit, desk.collect)
        first = _asked(mail, 20)
        await until(lambda: len(desk.messages) == 1)
        second = _asked(mail, 2)
        desk.end(5)
        desk.end(15)
        assert all(one.stop_reason == "length" for one in await asyncio.gather(*first))
        await until(lambda: len(desk.messages) == 2)
        desk.end(2)
        await asyncio.gather(*second)
        assert desk.messages == [(list(range(20)), 0), ([0, 1], 0)]
        await mail.close()

    asyncio.run(work())


def test_who_gives_up_takes_the_request_back() -> None:
    async def work() -> None:
        desk = Desk()
        mail = RequestMail(desk.submit, desk.collect)
        asked = _asked(mail, 4)
        await until(lambda: len(desk.messages) == 1)
        # Both in one turn of the loop.
        asked[1].cancel()
        asked[2].cancel()
        await until(lambda: len(desk.messages) == 2)
        desk.end(4)
        done = await asyncio.gather(*asked, return_exceptions=True)
        given_up = asyncio.CancelledError
        assert [type(one) for one in done] == [Completion, given_up, given_up, Completion]
        assert desk.messages == [([0, 1, 2, 3], 0), ([], 2)]
        await mail.close()

    asyncio.run(work())


@pytest.mark.parametrize("lost_while", ["submitting", "collecting"])
def test_a_lost_process_is_told_to_everybody_who_waits(lost_while: str) -> None:
    async def work() -> list[Any]:
        desk = Desk()
        error = WorkerLostError("gone", phase="generate", host="node1")
        mail = RequestMail(desk.submit, desk.collect)
        if lost_while == "submitting":
            desk.error = error
        asked = _asked(mail, 3)
        await until(lambda: len(desk.messages) == 1)
        desk.ended.put_nowait(error)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        await mail.close()
        return outcomes

    outcomes = asyncio.run(work())
    assert [type(one) for one in outcomes] == [WorkerLostError] * 3
    assert [one.host for one in outcomes] == ["node1"] * 3
    assert len({id(one) for one in outcomes}) == 3


def test_mail_that_is_closed_answers_what_is_open() -> None:
    async def work() -> list[Any]:
        desk = Desk()
        mail = RequestMail(desk.submit, desk.collect)
        asked = _asked(mail, 2)
        await until(lambda: len(desk.messages) == 1)
        desk.ended.put_nowait([(desk.open[0], EngineError("the generator was closed"))])
        desk.ended.put_nowait(EngineError("nobody there"))
        await mail.close()
        return await asyncio.gather(*asked, return_exceptions=True)

    outcomes = asyncio.run(work())
    assert all(isinstance(one, ForgeTrainerError) for one in outcomes)
    assert [str(one) for one in outcomes] == ["the generator was closed", "nobody there"]
