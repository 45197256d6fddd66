"""What can be configured of environments, and what docs/environments.md shows of it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from forge_trainer.config import EnvironmentConfig, FixedReward, GrpoConfig
from forge_trainer.config.load import dump_config, load_config
from forge_trainer.environments import make_episode_runner
from forge_trainer.errors import ConfigError
from forge_trainer.functional.rewards import as_reward
from forge_trainer.types import (
    Completion,
    Episode,
    GenerationRequest,
    Prompt,
    SamplingParams,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def load(block: str, folder: Path, *overrides: str) -> GrpoConfig:
    file = folder / "config.yaml"
    file.write_text("run: {folder: out, steps: 3}\nmodel: {tiny: {}}\n" + block)
    return load_config(GrpoConfig, file, overrides)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("environment: {rewards: {a: {group: true}}}", "rewards.a.group: .* there is no function"),
        ("environment: {rewards: {a: {weight: .nan}}}", "rewards.a.weight: .* finite number"),
        ("environment: {min_group: 9}", "min_group: 9 exceeds algorithm.group_size=8"),
        ("environment: {max_tokens: 145}", "max_tokens: 145, but generator.max_prompt_tokens"),
        ("environment: {on_truncated: zero}", "input should be 'keep' or 'exclude'"),
        ("environment: {on_failure: keep}", "input should be 'fail' or 'drop'"),
        (
            "task: {reward: exact_match}\nenvironment: {rewards: {a: {function: exact_match}}}",
            "task.reward: 'exact_match' would not be asked",
        ),
    ],
)
def test_what_cannot_work_is_one_config_error(tmp_path: Path, block: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(block, tmp_path)


def test_policies_can_be_given_on_the_command_line_and_are_dumped(tmp_path: Path) -> None:
    overrides = ["--environment.on_truncated.reward", "-1", "--environment.on_failure", "drop"]
    config = load("environment: {retries: 2}", tmp_path, *overrides)
    assert config.environment.on_truncated == FixedReward(reward=-1.0)
    assert (config.environment.on_failure, config.environment.retries) == ("drop", 2)
    dump_config(config, tmp_path / "dumped.yaml")
    assert load_config(GrpoConfig, tmp_path / "dumped.yaml") == config


def test_every_config_of_the_docs_loads(tmp_path: Path) -> None:
    names = [load(block, tmp_path).environment.name for block in blocks("yaml")]
    assert names == [
        "single_turn",
        "my_package.my_module:SecondChance",
        "single_turn",
        "forge_trainer.environments.adapters.verifiers:Verifiers",
        "forge_trainer.environments.adapters.openenv:OpenEnv",
    ]


def test_the_environment_of_the_docs_runs(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_docs_environment.py").write_text(blocks("python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    config = EnvironmentConfig(name="my_docs_environment:SecondChance", options={"chances": 3})

    async def answer(request: GenerationRequest) -> Completion:
        # "Capital of France?" and then a hint
        text = "Rome" if len(request.token_ids) < 30 else "Paris"
        ids = [5] * len(text)
        return Completion(
            request.token_ids, ids, [-1.0] * len(ids), [0] * len(ids), text, 1.0, "stop"
        )

    async def play() -> Episode:
        runner = make_episode_runner(
            config,
            None,
            model_dir=tiny_qwen3,
            sampling=SamplingParams(max_completion_tokens=8),
            max_prompt_tokens=64,
            seed=0,
        )
        prompt = Prompt("Capital of France?", "Paris")
        return await runner.run_episode(answer, prompt, group_id=0, index=0)

    episode = asyncio.run(play())
    assert [message.content for message in episode.messages[1:]] == [
        "Rome",
        "No. It has 5 letters.",
        "Paris",
    ]
    assert (episode.rewards, episode.metrics) == ({"solved": 1.0}, {"left": 1.0})
    assert len(blocks("python")[0].strip().splitlines()) < 30


def test_the_rewards_of_the_docs_are_what_they_are_said_to_be() -> None:
    names: dict[str, Any] = {}
    exec(blocks("python")[1], names)
    prompt = Prompt("", "")
    assert names["brevity"]("ab", prompt) == -0.02
    assert names["distinct"](["a", "b", "a"], prompt) == [0.5, 1.0, 0.5]
    assert as_reward(names["distinct"]).takes_group
    assert not as_reward(names["brevity"]).takes_group
