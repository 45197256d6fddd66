"""Generators as processes that work as one: what they share, and what is lost with one of them.

Each test that loses one takes another one of three, so that there are two for every test.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_trainer.pieces import WeightsRef
from forge_trainer.protocols import Generator
from forge_trainer.types import Completion, GenerationRequest, SamplingParams
from tests.actors.conftest import GENERATOR, TRAINER, Cluster, running_cluster
from tests.data import random_sequences

TRIO = GENERATOR.model_copy(update={"replicas": 3, "batch_size": 4, "request_timeout_s": 20.0})
SAMPLING = SamplingParams(max_completion_tokens=20)


@pytest.fixture(scope="module")
def trio(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    trainer = TRAINER.model_copy(update={"num_ranks": 1})
    folder = tmp_path_factory.mktemp("checkpoints")
    with running_cluster(tiny_qwen3, folder, trainer, generator=TRIO) as cluster:
        yield cluster


def _requests(number: int) -> list[GenerationRequest]:
    """Equal ones have equal completions, whoever samples them."""
    return [
        GenerationRequest([3, 4, 5], SAMPLING, seed=seed, group=str(seed // 4))
        for seed in range(number)
    ]


async def _ask(cluster: Cluster, number: int) -> list[Completion]:
    asked = (cluster.generator.generate_one(request) for request in _requests(number))
    return list(await asyncio.gather(*asked))


async def _is_given_requests(generator: Generator) -> None:
    while not (await generator.get_status()).num_waiting:
        await asyncio.sleep(0.01)


def _last(cluster: Cluster) -> tuple[str, Generator, int]:
    """Name, handle and process of one that is left."""
    name, generator = list(cluster.generator.replicas.items())[-1]
    return name, generator, cluster.run(generator.get_status()).pid


def test_all_pull_and_all_answer_with_what_they_pulled(trio: Cluster) -> None:
    trio.run(trio.trainer.train_step(random_sequences(4), loss="grpo"))
    ref: WeightsRef = trio.run(trio.trainer.push_weights())
    assert trio.run(trio.generator.pull_weights(ref)) == ref.version
    held = [trio.run(one.weight_checksums()) for one in trio.generator.replicas.values()]
    assert all(one == held[0] for one in held)
    assert held[0].version == ref.version
    before = trio.run(trio.generator.get_status())
    groups = trio.run(trio.generator.generate(["3,7:"] * len(held), SAMPLING))
    assert {group[0].policy_version for group in groups} == {ref.version.policy_version}
    assert len({group[0].text for group in groups}) > 1, "they draw the same numbers"
    after = trio.run(trio.generator.get_status())
    for one, was in zip(after.replicas, before.replicas, strict=True):
        if one.state == "serving":
            assert one.status.num_completions == was.status.num_completions + 1


def test_a_generator_killed_in_mid_request_costs_none(trio: Cluster) -> None:
    """What it had goes to the others, who go on with new weights."""
    alike = trio.run(_ask(trio, 24))
    name, victim, pid = _last(trio)

    async def ask_and_kill() -> list[Completion]:
        await victim.pause()
        asking = asyncio.create_task(_ask(trio, 24))
        await _is_given_requests(victim)
        os.kill(pid, signal.SIGKILL)
        return await asking

    assert trio.run(ask_and_kill()) == alike
    status = trio.run(trio.generator.get_status())
    (lost,) = (one for one in status.replicas if one.name == name)
    assert lost.state == "lost"
    assert f"a {name} process is gone" in str(lost.reason)
    assert name not in trio.generator.replicas

    trio.run(trio.trainer.train_step(random_sequences(4), loss="grpo"))
    ref: WeightsRef = trio.run(trio.trainer.push_weights())
    assert trio.run(trio.generator.pull_weights(ref)) == ref.version
    (one,) = trio.run(_ask(trio, 1))
    assert one.policy_version == ref.version.policy_version


def test_a_generator_that_hangs_is_taken_out(trio: Cluster) -> None:
    """Stopped, its process is there, and answers nothing. The others are slow at most."""
    alike = trio.run(_ask(trio, 8))
    name, _, pid = _last(trio)
    left = len(trio.generator.replicas)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert trio.run(_ask(trio, 8)) == alike
    finally:
        os.kill(pid, signal.SIGCONT)
    assert name not in trio.generator.replicas
    assert len(trio.generator.replicas) == left - 1
