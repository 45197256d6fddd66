"""Rewards in processes of their own: hangs, deaths, batches, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge_trainer.config import EnvironmentConfig, TaskConfig
from forge_trainer.data.prompts import make_task
from forge_trainer.environments import EpisodeRunner, make_episode_runner
from forge_trainer.environments.reward_calls import Answer
from forge_trainer.environments.reward_pool import RewardPool
from forge_trainer.errors import ConfigError, RolloutError
from forge_trainer.functional.rewards import as_reward
from forge_trainer.types import Completion, Episode, GenerationRequest, Prompt, SamplingParams
from tests.waiting import until, wait_until

HERE = "tests.actors.test_reward_pool"
PROMPT = Prompt("", "yes")
TEXTS = ["1", "hang", "die", "nan", "raise", "6"]


def judge(completion: str, prompt: Prompt) -> float:
    """What a completion asks for is done to this process."""
    if completion == "hang":
        time.sleep(10_000)
    if completion == "die":
        os._exit(3)
    return float(completion) if completion != "raise" else 1 / 0


def process_id(completion: str, prompt: Prompt) -> float:
    return float(os.getpid())


def ranks(texts: Sequence[str], prompt: Prompt) -> list[float]:
    return [float(sorted(texts).index(text)) for text in texts]


def gate(completion: str, prompt: Prompt) -> float:
    """Says that it is there, and waits to be let go, in the folder that the prompt names."""
    folder = Path(prompt.text)
    (folder / f"reached-{completion}-{os.getpid()}").touch()
    wait_until((folder / "open").exists)
    return 1.0


@asynccontextmanager
async def pool_of(
    *functions: Callable[..., Any], num_processes: int = 1, timeout_s: float = 100.0
) -> AsyncIterator[RewardPool]:
    rewards = {function.__name__: as_reward(function) for function in functions}
    pool = RewardPool(rewards, num_processes=num_processes, timeout_s=timeout_s)
    try:
        yield pool
    finally:
        workers = workers_of_this_process()
        await pool.close()
        assert [one for one in workers if one.is_running()] == []


def workers_of_this_process() -> list[psutil.Process]:
    """Those below the server that forks them."""
    return [
        worker
        for server in psutil.Process().children()
        if "forkserver" in " ".join(server.cmdline())
        for worker in server.children()
    ]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_what_one_text_does_to_its_reward_is_not_laid_at_the_others_door() -> None:
    async def ask() -> tuple[list[Answer], int]:
        async with pool_of(judge, timeout_s=2) as pool:
            return await pool.ask("judge", TEXTS, PROMPT), pool.num_lost

    answers, num_lost = run(ask())
    assert answers[0] == 1.0
    assert answers[1] == "took longer than 2 s"
    assert str(answers[2]).startswith("ended its process: Abnormal termination")
    assert answers[3] == "gave nan, which is no finite number"
    assert answers[4] == "raised ZeroDivisionError: division by zero"
    assert answers[5] == 6.0
    assert num_lost >= 2


def test_nothing_starts_before_the_first_call_and_a_group_travels_together() -> None:
    async def ask() -> None:
        async with pool_of(process_id, ranks) as pool:
            assert workers_of_this_process() == []
            here = await pool.ask("process_id", ["a"] * 8, PROMPT)
            assert here == [float(workers_of_this_process()[0].pid)] * 8
            assert await pool.ask("ranks", ["c", "a", "b"], PROMPT) == [2.0, 0.0, 1.0]

    run(ask())


def test_a_process_that_was_killed_is_replaced_and_its_call_asked_again(tmp_path: Path) -> None:
    async def ask() -> None:
        async with pool_of(gate) as pool:
            prompt = Prompt(str(tmp_path), "")
            asked = asyncio.create_task(pool.ask("gate", ["x"], prompt))
            await until(lambda: len(list(tmp_path.glob("reached-*"))) == 1)
            os.kill(workers_of_this_process()[0].pid, signal.SIGKILL)
            await until(lambda: len(list(tmp_path.glob("reached-*"))) == 2)
            (tmp_path / "open").touch()
            assert await asked == [1.0]
            assert pool.num_lost == 1

    run(ask())


def test_an_idle_process_that_was_killed_costs_nothing() -> None:
    async def ask() -> None:
        async with pool_of(process_id) as pool:
            (before,) = await pool.ask("process_id", ["a"], PROMPT)
            (worker,) = workers_of_this_process()
            worker.kill()
            await until(lambda: not worker.is_running())
            (after,) = await pool.ask("process_id", ["a"], PROMPT)
            assert isinstance(after, float)
            assert after != before

    run(ask())


def test_the_loop_goes_on_while_a_reward_computes(tmp_path: Path) -> None:
    async def ask() -> None:
        async with pool_of(gate, num_processes=2) as pool:
            prompt = Prompt(str(tmp_path), "")
            asked = [asyncio.create_task(pool.ask("gate", [text], prompt)) for text in "ab"]
            await until(lambda: len(list(tmp_path.glob("reached-*"))) == 2)
            assert not any(task.done() for task in asked)
            (tmp_path / "open").touch()
            assert await asyncio.gather(*asked) == [[1.0], [1.0]]

    run(ask())


def test_a_caller_that_is_cancelled_ends_what_it_asked_for(tmp_path: Path) -> None:
    async def ask() -> None:
        async with pool_of(gate, process_id) as pool:
            asked = asyncio.create_task(pool.ask("gate", ["x"], Prompt(str(tmp_path), "")))
            await until(lambda: len(list(tmp_path.glob("reached-*"))) == 1)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            # The only process would still wait at the gate.
            assert len(await pool.ask("process_id", ["a"], PROMPT)) == 1

    run(ask())


def test_what_cannot_be_sent_is_a_failure_of_its_own() -> None:
    async def ask() -> list[Answer]:
        async with pool_of(process_id) as pool:
            return await pool.ask("process_id", ["a"], Prompt("", "", metadata={"x": open}))

    (answer,) = run(ask())
    assert isinstance(answer, float)
    with pytest.raises(ConfigError, match="cannot be sent to the processes of rewards"):
        RewardPool({"x": as_reward(Unsendable())}, num_processes=1, timeout_s=1)


class Unsendable:
    def __call__(self, completion: str, prompt: Prompt) -> float:
        return 0.0

    def __reduce__(self) -> Any:
        raise TypeError("stay")


def test_reasoning_gym_judges_in_the_pool(tiny_qwen3: Path) -> None:
    options = {"min_digits": 1, "max_digits": 1}
    task = make_task(TaskConfig(name="reasoning_gym/chain_sum", options=options), seed=0)
    prompt = next(iter(task.prompts))

    async def answer(request: GenerationRequest) -> Completion:
        text = prompt.answer if request.seed % 2 else "nothing"
        return Completion(request.token_ids, [5], [-1.0], [0], text, 1.0, "stop")

    async def judge_group() -> set[tuple[str, float]]:
        runner = runner_of(tiny_qwen3, task.reward)
        try:
            group = await runner.run_group(answer, prompt, group_id=0, group_size=8)
        finally:
            await runner.close()
        assert group is not None
        return {(episode.messages[-1].content, episode.reward) for episode in group}

    answers = dict(run(judge_group()))
    assert answers[prompt.answer] == 1.0
    assert answers["nothing"] < 0.5


def runner_of(folder: Path, reward: Callable[..., Any] | None, **config: Any) -> EpisodeRunner:
    return make_episode_runner(
        EnvironmentConfig.model_validate(config),
        reward,
        model_dir=folder,
        sampling=SamplingParams(max_completion_tokens=8),
        max_prompt_tokens=1000,
        seed=0,
    )


def test_a_reward_that_dies_is_counted_under_its_name(tiny_qwen3: Path) -> None:
    async def say(request: GenerationRequest) -> Completion:
        text = "1" if request.seed % 2 else "die"
        return Completion(request.token_ids, [5], [-1.0], [0], text, 1.0, "stop")

    async def judged(on_failure: str) -> tuple[list[Episode] | None, dict[str, float]]:
        rewards = {"judge": {"function": f"{HERE}:judge"}}
        runner = runner_of(tiny_qwen3, None, rewards=rewards, on_failure=on_failure, min_group=1)
        try:
            group = await runner.run_group(say, PROMPT, group_id=0, group_size=6)
            return group, runner.take_counts()
        finally:
            await runner.close()

    group, counts = run(judged("drop"))
    died = [episode for episode in group if episode.status == "failed"]
    assert len(died) == counts["failures/judge"] > 0
    assert counts["rollout/reward_processes_lost"] > 0
    assert {episode.reward for episode in group if not episode.excluded} == {1.0}
    with pytest.raises(RolloutError, match="judge ended its process"):
        run(judged("fail"))


SCRIPT = f"""
import asyncio, sys
from {HERE} import pool_of, process_id, gate, PROMPT
from forge_trainer.types import Prompt

async def main():
    async with pool_of(process_id, gate) as pool:
        await pool.ask("process_id", ["a"], PROMPT)
        print("ready", flush=True)
        await pool.ask("gate", ["a"], Prompt(sys.argv[1], ""))

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_one_that_started_it(
    tmp_path: Path, ending: signal.Signals
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        wait_until(lambda: bool(list(tmp_path.glob("reached-*"))))
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 3
        process.send_signal(ending)
        process.wait()
    wait_until(lambda: not any(child.is_running() for child in children))
