"""Loops, pipeline and reporting without processes: honest fakes that keep the protocols."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from forge_trainer.config import AlgorithmConfig, TaskConfig
from forge_trainer.data.prompts import make_task
from forge_trainer.errors import ConfigError
from forge_trainer.reporting import Reporter
from forge_trainer.reporting.console import SummarySink
from forge_trainer.reporting.files import MetricsFile, RolloutsFile, TensorBoardSink
from forge_trainer.tasks import run_with_background
from forge_trainer.types import Episode
from tests.unit.test_small_functions import episode


def test_the_first_failure_of_either_loop_ends_both() -> None:
    ended: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("forever")

    async def failing() -> None:
        raise ConnectionError("generator is gone")

    for pair in ((forever(), failing()), (failing(), forever())):
        with pytest.raises(ConnectionError, match="generator is gone"):
            asyncio.run(run_with_background(*pair))
    assert ended == ["forever", "forever"]


def test_larger_digit_needs_its_prompt() -> None:
    task = make_task(TaskConfig(), seed=0)
    assert task.reward is not None
    prompts = [next(task.prompts) for _ in range(2000)]
    best_constant = max(
        sum(task.reward(str(digit), prompt) for prompt in prompts) / len(prompts)
        for digit in range(10)
    )
    assert best_constant <= 0.3
    assert all(task.reward(prompt.answer, prompt) == 1.0 for prompt in prompts)
    assert prompts[0].text[3] == ":"
    again = make_task(TaskConfig(), seed=0)
    assert [next(again.prompts) for _ in range(20)] == prompts[:20]


def test_reasoning_gym_tasks_judge_with_their_own_scorer() -> None:
    config = TaskConfig(name="reasoning_gym/chain_sum", options={"min_terms": 2, "max_terms": 2})
    task = make_task(config, seed=0)
    assert task.reward is not None
    prompt = next(task.prompts)
    assert task.reward(f" {prompt.answer}\n", prompt) == 1.0
    assert task.reward("no idea", prompt) < 1.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TaskConfig(name="chess"), "task.name: 'chess' is unknown"),
        (TaskConfig(options={"digits": 3}), "larger_digit takes none"),
        (TaskConfig(name="reasoning_gym/none"), "cannot make 'none'"),
        (TaskConfig(name="reasoning_gym/chain_sum", options={"x": 1}), "cannot make 'chain_sum'"),
        (TaskConfig(reward="best"), "reward 'best' is unknown"),
    ],
)
def test_tasks_that_do_not_exist_are_config_errors(config: TaskConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(config, seed=0)


def test_files_hold_one_object_per_step_and_chosen_episodes(tmp_path: Path) -> None:
    reporter = Reporter(
        [
            MetricsFile(tmp_path / "metrics.jsonl", tmp_path / "evaluations.jsonl"),
            RolloutsFile(tmp_path / "rollouts.jsonl", per_step=2),
            TensorBoardSink(tmp_path / "tensorboard"),
        ]
    )
    episodes: Sequence[Episode] = [episode(1.0), episode(0.5), episode(0.0)]
    rows: list[Mapping[str, float]] = [
        {"step": 1, "trainer/grad_norm": 2.0},
        {"step": 2, "trainer/grad_norm": math.nan},
    ]
    for row in rows:
        reporter.report_step(row, episodes)
    reporter.report_evaluation({"step": 2, "eval/reward": 0.5, "eval/reward_high": math.inf})
    reporter.close()
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert metrics == [
        {"step": 1, "trainer/grad_norm": 2.0},
        {"step": 2, "trainer/grad_norm": None},
    ]
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert json.loads(lines[0]) == {
        "step": 1,
        "prompt": "3,7:",
        "completion": "x",
        "answer": "7",
        "reward": 1.0,
        "rewards": {},
        "status": "completed",
        "turns": 1,
        "messages": [
            {"role": "user", "content": "3,7:"},
            {"role": "assistant", "content": "x"},
        ],
        "policy_version": 0,
    }
    evaluation = {"step": 2, "eval/reward": 0.5, "eval/reward_high": None}
    assert json.loads((tmp_path / "evaluations.jsonl").read_text()) == evaluation
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_the_summary_compares_first_and_last_steps(capsys: pytest.CaptureFixture[str]) -> None:
    sink = SummarySink(Path("runs/x"), Path("runs/x/final"))
    for step in range(30):
        sink.write_step({"step": step, "reward/mean": step / 10}, [])
    sink.close()
    printed = capsys.readouterr().out
    assert "0.45" in printed
    assert "2.45" in printed
    assert "runs/x" in printed


def test_group_sizes_of_one_are_refused() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        AlgorithmConfig(group_size=1)
