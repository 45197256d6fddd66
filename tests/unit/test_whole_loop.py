"""Both loops with a real trainer and a real generator in this process, against the plain loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from apps.grpo.parts import sampler
from forge_trainer.config import AlgorithmConfig, EnvironmentConfig, EvalConfig, TaskConfig
from forge_trainer.data.prompts import make_task
from forge_trainer.environments import EpisodeRunner, make_episode_runner
from forge_trainer.replay import Replay
from forge_trainer.reporting import Reporter
from forge_trainer.run.evaluation import Evaluation
from forge_trainer.run.pipeline import Pipeline
from forge_trainer.run.rollout import run_rollout
from forge_trainer.run.training import Models, TrainPlan, Watchers, run_training, sequences_of
from forge_trainer.tasks import run_with_background
from forge_trainer.types import Episode, Prompt, SamplingParams
from tests.data import same_numbers
from tests.unit.conftest import Bench
from tests.waiting import A_HANG_S

P, G, STEPS = 3, 4, 4
ALGORITHM = AlgorithmConfig(group_size=G, groups_per_step=P)


class Seen:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, float]] = []
        self.episodes: list[Episode] = []
        self.evaluations: list[Mapping[str, float]] = []

    def write_step(self, row: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        self.rows.append(row)
        self.episodes += episodes

    def write_evaluation(self, row: Mapping[str, float]) -> None:
        self.evaluations.append(row)

    def close(self) -> None: ...


def _runner(model_dir: Path) -> EpisodeRunner:
    return make_episode_runner(
        EnvironmentConfig(),
        _counts_low_bytes,
        model_dir=model_dir,
        sampling=SamplingParams(6),
        max_prompt_tokens=8,
        seed=3,
    )


async def _counts_low_bytes(text: str, prompt: Prompt) -> float:
    """A reward that an untrained model gets now and then: it is async, so it runs here."""
    return sum(ord(character) < 128 for character in text) / 6


async def _loops(
    bench: Bench, model_dir: Path, max_staleness: int, seen: Seen, *, held_out: bool = False
) -> None:
    generator: Any = bench.generator
    runner = _runner(model_dir)
    pipeline = Pipeline(Replay(groups_per_step=P, max_staleness=max_staleness))
    prompts = make_task(TaskConfig(), seed=0).prompts
    evaluation = None
    if held_out:
        asked = list(itertools.islice(make_task(TaskConfig(), seed=9).prompts, 4))
        evaluation = Evaluation(
            EvalConfig(every=2), asked, sampler(_runner(model_dir), generator, 1)
        )
    training = run_training(
        Models(bench.trainer, generator),
        pipeline,
        Watchers(Reporter([seen]), evaluation),
        TrainPlan(STEPS, ALGORITHM, checkpoint_interval=0),
    )
    rollout = run_rollout(prompts, sampler(runner, generator, G), pipeline)
    async with asyncio.timeout(A_HANG_S):
        await run_with_background(training, rollout)


async def _in_turn(bench: Bench, model_dir: Path) -> list[Episode]:
    """Sample everything, train on it, bring over the weights; again."""
    generator: Any = bench.generator
    sample, episodes = sampler(_runner(model_dir), generator, G), list[Episode]()
    numbered = enumerate(make_task(TaskConfig(), seed=0).prompts)
    for _ in range(STEPS):
        batch = list(itertools.islice(numbered, P))
        groups: Any = await asyncio.gather(*(sample(prompt, index) for index, prompt in batch))
        await bench.trainer.train_step(sequences_of(groups, ALGORITHM), loss="grpo")
        await generator.pull_weights(await bench.trainer.push_weights())
        episodes += [episode for group in groups for episode in group]
    return episodes


def _weights(bench: Bench) -> Any:
    return bench.run(bench.generator.weight_checksums()).tensors


@pytest.mark.parametrize("bench", ["local"], indirect=True)
def test_without_staleness_the_loops_are_the_plain_loop_bit_for_bit(
    bench: Bench, tiny_qwen3: Path
) -> None:
    before = bench.run(bench.trainer.save("begin"))
    plain = bench.run(_in_turn(bench, tiny_qwen3))
    wanted = _weights(bench)
    bench.run(bench.trainer.load(name="begin"))
    bench.run(_pull_again(bench))
    seen = Seen()
    bench.run(_loops(bench, tiny_qwen3, 0, seen))
    assert before.step == 0
    assert [e.transcripts for e in seen.episodes] == [e.transcripts for e in plain]
    assert [e.reward for e in seen.episodes] == [e.reward for e in plain]
    assert _weights(bench) == wanted
    assert [row["staleness/max"] for row in seen.rows] == [0] * STEPS
    assert all(row["rollout/logprob_gap"] < 1e-5 for row in seen.rows)


@pytest.mark.parametrize("bench", ["local"], indirect=True)
def test_an_evaluation_changes_nothing_of_training_but_rounding(
    bench: Bench, tiny_qwen3: Path
) -> None:
    """The same tokens are sampled; larger batches of them round otherwise."""
    bench.run(bench.trainer.save("begin"))
    plain = bench.run(_in_turn(bench, tiny_qwen3))[: P * G]
    bench.run(bench.trainer.load(name="begin"))
    bench.run(_pull_again(bench))
    seen = Seen()
    bench.run(_loops(bench, tiny_qwen3, 0, seen, held_out=True))
    for one, other in zip(seen.episodes[: P * G], plain, strict=True):
        assert same_numbers([one.transcripts[0].token_ids], [other.transcripts[0].token_ids])
        assert one.transcripts[0].logprobs == pytest.approx(other.transcripts[0].logprobs, abs=1e-5)
    assert [row["step"] for row in seen.evaluations] == [0, 2, 4]


async def _pull_again(bench: Bench) -> None:
    generator: Any = bench.generator
    await generator.pull_weights(await bench.trainer.push_weights())


@pytest.mark.parametrize("bench", ["local"], indirect=True)
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_ahead_no_token_is_older_than_the_limit_and_every_version_is_what_it_says(
    bench: Bench, tiny_qwen3: Path, max_staleness: int
) -> None:
    seen = Seen()
    bench.run(_loops(bench, tiny_qwen3, max_staleness, seen))
    assert [row["step"] for row in seen.rows] == [1, 2, 3, 4]
    assert max(row["staleness/max"] for row in seen.rows) >= 1
    assert all(row["staleness/max"] <= row["staleness/limit"] for row in seen.rows)
    assert seen.rows[-1]["replay/dropped"] == 0
    assert len({e.group_id for e in seen.episodes}) == P * STEPS
