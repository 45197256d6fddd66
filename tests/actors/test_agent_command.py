"""Agents that are processes: what they are told, what they give back, and how they are ended."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from forge_trainer.config import EnvironmentConfig
from forge_trainer.environments import EpisodeRunner, make_episode_runner
from forge_trainer.errors import RolloutError
from forge_trainer.types import Episode, Prompt, SamplingParams
from tests.chat import CHATML, ScriptedModel, chat_directory
from tests.processes import descendants, wait_until_gone
from tests.waiting import A_HANG_S, until

PROMPT = Prompt("hi", "yes", metadata={"level": 3})
END = "<|im_end|>"
AGENT = """
import json, os, subprocess, sys, time, urllib.request

def ask(content):
    body = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

task = json.load(sys.stdin)
said = ask(task["prompt"]["text"])
"""


def make_runner(folder: Path, what_then: str, **config: Any) -> EpisodeRunner:
    agent = folder / "agent.py"
    agent.write_text(AGENT + what_then)
    options = {"command": [sys.executable, str(agent)], "how": "gently"}
    return make_episode_runner(
        EnvironmentConfig.model_validate({"name": "agent", "options": options} | config),
        None,
        model_dir=chat_directory(folder, CHATML),
        sampling=SamplingParams(max_completion_tokens=100),
        max_prompt_tokens=1000,
        seed=3,
    )


def play(folder: Path, what_then: str, **config: Any) -> Episode:
    made = make_runner(folder, what_then, **config)
    model = ScriptedModel(folder, ["yes" + END], stop=END)

    async def one() -> Episode:
        try:
            return await made.run_episode(model.generate_one, PROMPT, group_id=5, index=2)
        finally:
            await made.close()

    return asyncio.run(one())


def test_a_command_finds_its_task_and_prints_its_reward(tmp_path: Path) -> None:
    episode = play(
        tmp_path,
        """
assert task["options"] == {"how": "gently"}
assert type(task["seed"]) is int
right = float(said == task["prompt"]["answer"])
print("I am done")
print(json.dumps({"right": right, "level": task["prompt"]["metadata"]["level"]}))
""",
    )
    assert (episode.status, episode.num_turns) == ("completed", 1)
    assert episode.rewards == {"right": 1.0, "level": 3.0}


def test_a_command_may_leave_judging_to_others(tmp_path: Path) -> None:
    assert play(tmp_path, "").rewards == {}


@pytest.mark.parametrize(
    ("what_then", "message"),
    [
        ("raise ValueError('out of order')", "ended with exit code 1: .*ValueError: out of order"),
        ("print('good!')", "printed 'good!' last; it must be a reward"),
        ("print(json.dumps({'right': 'yes'}))", "gave 'yes', which is no finite number"),
        ("os.kill(os.getpid(), 9)", "ended with exit code -9"),
    ],
)
def test_a_command_that_fails_is_told_with_what_it_said(
    tmp_path: Path, what_then: str, message: str
) -> None:
    with pytest.raises(RolloutError, match=f"(?s)agent {message}"):
        play(tmp_path, what_then)


def test_a_command_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    """When its episode is given up."""
    started = tmp_path / "started"
    hang = f"""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({A_HANG_S})"])
with open({str(started)!r} + "_", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename({str(started)!r} + "_", {str(started)!r})
time.sleep({A_HANG_S})
"""
    made = make_runner(tmp_path, hang, step_timeout_s=A_HANG_S)
    model = ScriptedModel(tmp_path, ["yes" + END], stop=END)

    async def give_up() -> set[int]:
        running = made.run_episode(model.generate_one, PROMPT, group_id=5, index=2)
        task = asyncio.create_task(running)
        await until(started.exists)
        pids = {int(pid) for pid in started.read_text().split()}
        assert len(pids & descendants()) == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await made.close()
        return pids

    assert wait_until_gone(asyncio.run(give_up())) == set()
