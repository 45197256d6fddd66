"""Requests one by one to a generator in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from forge_trainer.errors import DataError, EngineError, WorkerLostError
from forge_trainer.types import Completion, TrainSequence
from forge_trainer.types.arrays import as_array
from tests.actors.conftest import TRAINER, Cluster, running_cluster
from tests.data import random_sequences
from tests.generators import request
from tests.waiting import until

GOOD = random_sequences(4)


async def _ask(cluster: Cluster, number: int) -> list[asyncio.Task[Completion]]:
    """That many, once the generator is paused and has them."""
    await cluster.generator.pause()
    tasks = [
        asyncio.create_task(cluster.generator.generate_one(request(seed=seed)))
        for seed in range(number)
    ]
    while (await cluster.generator.get_status()).num_waiting < number:
        await asyncio.sleep(0)
    return tasks


def test_requests_travel_together_and_have_the_trainers_logprobs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.run(cluster.trainer.train_step(GOOD, loss="grpo"))
    ref = cluster.run(cluster.trainer.push_weights())
    cluster.run(cluster.generator.pull_weights(ref))
    (only,) = cluster.generator.replicas.values()
    mail: Any = only._mail  # type: ignore[attr-defined]
    messages: list[int] = []
    submit = mail._submit

    async def counted(requests: Any, withdrawn: Any) -> None:
        messages.append(len(requests))
        await submit(requests, withdrawn)

    monkeypatch.setattr(mail, "_submit", counted)

    async def ask() -> list[Completion]:
        asked = [request([20 + s % 4, 30], 1 + s % 9, seed=s, temperature=0.7) for s in range(40)]
        return await asyncio.gather(*[cluster.generator.generate_one(one) for one in asked])

    completions, again = cluster.run(ask()), cluster.run(ask())
    assert messages == [40, 40]
    assert completions == again
    assert {c.policy_version for c in completions} == {ref.version.policy_version}
    sequences = [
        TrainSequence(
            [*c.prompt_token_ids, *c.token_ids],
            [0, 0] + [1] * len(c.token_ids),
            temperature=c.temperature,
        )
        for c in completions
    ]
    found = cluster.run(cluster.trainer.forward(sequences)).logprobs
    for completion, logprobs in zip(completions, found, strict=True):
        assert logprobs[2:] == pytest.approx(as_array(completion.logprobs).tolist(), abs=1e-5)


def test_refused_and_cancelled_requests_leave_the_others_alone(cluster: Cluster) -> None:
    async def ask() -> tuple[list[Any], Any]:
        tasks = await _ask(cluster, 4)
        refused = asyncio.create_task(cluster.generator.generate_one(request([20] * 17)))
        with pytest.raises(DataError, match="has 17 tokens, generator.max_prompt_tokens is 16"):
            await refused
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        while (await cluster.generator.get_status()).num_waiting > 3:
            await asyncio.sleep(0)
        await cluster.generator.resume()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        return done, await cluster.generator.get_status()

    done, status = cluster.run(ask())
    given_up = asyncio.CancelledError
    assert [type(one) for one in done] == [Completion, given_up, Completion, Completion]
    assert (status.num_running, status.num_waiting) == (0, 0)


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_open_requests_are_told_that_their_generator_is_gone(
    how: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = TRAINER.model_copy(update={"num_ranks": 1})
    with running_cluster(tiny_qwen3, tmp_path, config) as cluster:

        async def lose() -> list[Any]:
            tasks = await _ask(cluster, 3)
            if how == "closed":
                await cluster.generator.close()
            else:
                os.kill((await cluster.generator.get_status()).pid, signal.SIGKILL)
            await until(lambda: all(task.done() for task in tasks), "an answer to each")
            return await asyncio.gather(*tasks, return_exceptions=True)

        outcomes = cluster.run(lose())
        told = {"closed": EngineError, "killed": WorkerLostError}[how]
        assert [type(one) for one in outcomes] == [told] * 3
        message = {
            "closed": "the generator was closed while 3 requests were open",
            "killed": "a generator process is gone",
        }
        assert all(message[how] in str(one) for one in outcomes)
        if how == "killed":
            with pytest.raises(WorkerLostError, match="a generator process is gone"):
                cluster.run(cluster.generator.generate_one(request()))
