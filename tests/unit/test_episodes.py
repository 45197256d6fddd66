"""Episodes: limits, seeds, judging, and what becomes of what fails."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forge_trainer.config import EnvironmentConfig
from forge_trainer.environments import EpisodeRunner, make_episode_runner
from forge_trainer.errors import ConfigError, RolloutError
from forge_trainer.functional.seeds import opening_seed, request_seed
from forge_trainer.types import (
    Completion,
    Episode,
    GenerationRequest,
    Message,
    Opening,
    Prompt,
    Reply,
    SamplingParams,
    StopReason,
)
from tests.chat import CHATML, ScriptedModel, chat_directory
from tests.waiting import until

HERE = "tests.unit.test_episodes"
PROMPT = Prompt("hi", "yes")


@dataclass
class Script:
    """An environment that does what its class was told; what it was asked is kept."""

    kind: str = "echo"
    turns: int = 99

    made: list[Script] = field(default_factory=list, init=False)
    closed: int = field(default=0, init=False)

    async def reset(self, task: Prompt, seed: int) -> Opening:
        SEEN.append(self)
        self.seed, self.num_steps = seed, 0
        if self.kind == "bad opening":
            return task  # type: ignore[return-value]
        return Opening((Message("user", task.text),))

    async def step(self, message: Message, stop_reason: StopReason) -> Reply:
        self.num_steps += 1
        if self.kind == "raises" or (self.kind == "raises once" and len(SEEN) == 1):
            raise ValueError("out of order")
        if self.kind == "hangs":
            await asyncio.Event().wait()
        if self.kind == "speaks for the model":
            return Reply((Message("assistant", "I"),))
        if self.kind == "silent":
            return Reply()
        reward = math.nan if self.kind == "nan" else 0.25
        rewards, metrics = {"polite": reward}, {"steps": float(self.num_steps)}
        done = self.num_steps == self.turns
        return Reply((Message("user", "go on"),), done=done, rewards=rewards, metrics=metrics)

    async def close(self) -> None:
        self.closed += 1


SEEN: list[Script] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    SEEN.clear()
    yield
    assert [one.closed for one in SEEN] == [1] * len(SEEN)


def runner(
    folder: Path, *, reward: Callable[..., Any] | None = None, kind: str = "echo", **config: Any
) -> EpisodeRunner:
    """A runner whose environments are scripts, unless the config says otherwise."""
    options = {"kind": kind, "turns": config.pop("turns", 99)}
    max_prompt_tokens = config.pop("max_prompt_tokens", 64)
    chosen = {"name": f"{HERE}:Script", "options": options} | config
    return make_episode_runner(
        EnvironmentConfig.model_validate(chosen),
        reward,
        model_dir=folder,
        sampling=SamplingParams(max_completion_tokens=8),
        max_prompt_tokens=max_prompt_tokens,
        seed=7,
    )


def says(*texts: str) -> Callable[[GenerationRequest], Coroutine[Any, Any, Completion]]:
    """Endlessly, each episode from the first one on: what is said depends on the turn alone."""

    async def generate_one(request: GenerationRequest) -> Completion:
        text = texts[TURNS[request.seed] % len(texts)]
        ids = [4] * len(text)
        return Completion(
            request.token_ids,
            ids,
            [-1.0] * len(ids),
            [0] * len(ids),
            text,
            1.0,
            "length" if text.endswith("-") else "stop",
        )

    return generate_one


TURNS = {
    request_seed(7, group_id=group_id, index=index, turn=turn): turn
    for group_id in range(3)
    for index in range(4)
    for turn in range(40)
}


def one(made: EpisodeRunner, *texts: str) -> Episode:
    return asyncio.run(made.run_episode(says(*texts), PROMPT, group_id=0, index=0))


def group(made: EpisodeRunner, *texts: str, size: int = 3) -> list[Episode] | None:
    return asyncio.run(made.run_group(says(*texts), PROMPT, group_id=0, group_size=size))


def test_rewards_of_turns_are_summed_and_the_last_metric_counts(tiny_qwen3: Path) -> None:
    episode = one(runner(tiny_qwen3, turns=3), "a", "b", "c")
    assert episode.status == "completed"
    assert episode.rewards == {"polite": 0.75}
    assert episode.metrics == {"steps": 3.0}
    assert episode.num_turns == 3
    assert [m.content for m in episode.messages] == ["hi", "a", "go on", "b", "go on", "c"]


@pytest.mark.parametrize(
    ("config", "texts", "status", "turns"),
    [
        ({"max_turns": 2}, "ab", "truncated_turns", 2),
        # hi, ab, go on: 2 + 2 + 5 + 2 + 5 = 16
        ({"max_tokens": 16}, ["ab"], "truncated_tokens", 2),
        ({"max_tokens": 17}, ["ab"], "truncated_tokens", 3),
        ({"max_prompt_tokens": 10}, ["ab"], "truncated_tokens", 2),
        ({"max_prompt_tokens": 1}, ["ab"], "truncated_tokens", 0),
        ({"turns": 1}, ["ab-"], "truncated_completion", 1),
        ({"turns": 2}, ["ab-", "c"], "completed", 2),
    ],
)
def test_a_limit_ends_an_episode_with_its_own_status(
    tiny_qwen3: Path, config: dict[str, Any], texts: Sequence[str], status: str, turns: int
) -> None:
    episode = one(runner(tiny_qwen3, **config), *texts)
    assert (episode.status, episode.num_turns) == (status, turns)
    assert len(episode.transcripts) == (turns > 0)


def test_the_last_answer_may_have_as_many_tokens_as_are_left(tiny_qwen3: Path) -> None:
    model = ScriptedModel(tiny_qwen3, ["abcdefgh"] * 3)
    made = runner(tiny_qwen3, max_tokens=19)
    asyncio.run(made.run_episode(model.generate_one, PROMPT, group_id=0, index=0))
    # 2 + 8 + 5 = 15 tokens of 19
    assert [r.sampling.max_completion_tokens for r in model.requests] == [8, 4]


def test_too_many_tool_calls_end_an_episode(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'
    model = ScriptedModel(chat_directory(tmp_path, CHATML), [call + "<|im_end|>"] * 3, "<|im_end|>")
    made = make_episode_runner(
        EnvironmentConfig(name="calculator", max_tool_calls=1),
        None,
        model_dir=tmp_path,
        sampling=SamplingParams(max_completion_tokens=100),
        max_prompt_tokens=1000,
        seed=0,
    )
    episode = asyncio.run(made.run_episode(model.generate_one, PROMPT, group_id=0, index=0))
    assert (episode.status, episode.num_turns) == ("truncated_tool_calls", 2)
    assert episode.metrics == {"calls": 1.0, "tool_calls": 2.0}


def test_time_that_is_over_ends_an_episode_and_takes_its_request_back(tiny_qwen3: Path) -> None:
    """The limit is the shortest that a config may give; what waits, waits for ever."""
    taken_back = []

    async def first_then_never(request: GenerationRequest) -> Completion:
        if TURNS[request.seed] == 0:
            return await says("a")(request)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            taken_back.append(request.id)
            raise
        raise AssertionError

    made = runner(tiny_qwen3, max_seconds=1)
    episode = asyncio.run(made.run_episode(first_then_never, PROMPT, group_id=0, index=0))
    assert (episode.status, episode.num_turns) == ("truncated_time", 1)
    assert len(taken_back) == 1


def test_a_time_out_of_the_generator_is_its_own_error(tiny_qwen3: Path) -> None:
    async def late(request: GenerationRequest) -> Completion:
        raise TimeoutError("no answer from the generator")

    made = runner(tiny_qwen3, max_seconds=100, on_failure="drop")
    with pytest.raises(TimeoutError, match="no answer from the generator"):
        asyncio.run(made.run_episode(late, PROMPT, group_id=0, index=0))


def test_a_cancelled_group_closes_its_environments(tiny_qwen3: Path) -> None:
    async def cancel() -> None:
        asked = 0

        async def never(request: GenerationRequest) -> Completion:
            nonlocal asked
            asked += 1
            await asyncio.Event().wait()
            raise AssertionError

        running = runner(tiny_qwen3).run_group(never, PROMPT, group_id=0, group_size=3)
        task = asyncio.create_task(running)
        await until(lambda: asked == 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert len(SEEN) == 3


def test_seeds_follow_from_run_group_episode_and_turn(tiny_qwen3: Path) -> None:
    """Numbers that must stay: a run goes on with the same ones."""
    assert request_seed(7, group_id=0, index=1, turn=2) == 8583981550910078153
    assert opening_seed(7, group_id=0) == 3883452134572270260
    names = [(s, g, i, t) for s in range(3) for g in range(3) for i in range(3) for t in range(3)]
    seeds = {request_seed(s, group_id=g, index=i, turn=t) for s, g, i, t in names}
    assert len(seeds) == 81
    assert max(seeds) < 2**63
    model = ScriptedModel(tiny_qwen3, ["a"] * 9)
    made = runner(tiny_qwen3, turns=2)
    asyncio.run(made.run_episode(model.generate_one, PROMPT, group_id=4, index=1))
    asked = [request.seed for request in model.requests]
    assert asked == [request_seed(7, group_id=4, index=1, turn=turn) for turn in range(2)]
    assert {request.group for request in model.requests} == {"4"}


def test_the_environments_of_a_group_begin_alike(tiny_qwen3: Path) -> None:
    group(runner(tiny_qwen3, turns=1), "a")
    assert [one.seed for one in SEEN] == [opening_seed(7, group_id=0)] * 3


def brevity(completion: str, prompt: Prompt) -> float:
    return -len(completion)


async def slow_judge(completion: str, prompt: Prompt) -> float:
    await asyncio.sleep(0)
    return float(completion == prompt.answer)


async def ranks(completions: Sequence[str], prompt: Prompt) -> list[float]:
    order = sorted(range(len(completions)), key=lambda i: len(completions[i]))
    return [float(order.index(i)) for i in range(len(completions))]


async def wrong_number(completions: Sequence[str], prompt: Prompt) -> list[float]:
    return [1.0]


async def not_a_number(completion: str, prompt: Prompt) -> float:
    return math.nan


async def not_even_a_number(completion: str, prompt: Prompt) -> object:
    return "0.5"


async def only_yes(completion: str, prompt: Prompt) -> float:
    ASKED.append(completion)
    if completion != prompt.answer:
        raise KeyError(completion)
    return 1.0


async def hangs(completion: str, prompt: Prompt) -> float:
    await asyncio.Event().wait()
    return 1.0


ASKED: list[str] = []


def reward(name: str, **more: Any) -> dict[str, Any]:
    return {"function": f"{HERE}:{name}", **more}


def test_rewards_are_weighted_and_summed_by_name(tiny_qwen3: Path) -> None:
    rewards = {
        "correct": {"function": "exact_match", "weight": 2.0},
        "judge": reward("slow_judge", weight=0.5),
        "rank": reward("ranks", weight=0.125),
        "polite": {"weight": 4.0},
    }
    episodes = group(runner(tiny_qwen3, turns=1, rewards=rewards), "yes", size=2)
    assert episodes is not None
    names = {"correct": 1.0, "judge": 1.0, "polite": 0.25}
    assert [e.rewards for e in episodes] == [{**names, "rank": 0.0}, {**names, "rank": 1.0}]
    assert [e.reward for e in episodes] == [2 + 0.5 + 1, 2 + 0.5 + 1 + 0.125]


def test_without_functions_the_tasks_reward_judges(tiny_qwen3: Path) -> None:
    from forge_trainer.functional.rewards import starts_with_answer

    made = runner(tiny_qwen3, reward=starts_with_answer, name="single_turn", options={})
    episodes = group(made, "yes!", size=2)
    assert episodes is not None
    assert [(e.reward, e.rewards, e.status) for e in episodes] == [
        (1.0, {"task": 1.0}, "completed")
    ] * 2
    weighed = {"t": {"function": "task", "weight": 3.0}}
    made = runner(
        tiny_qwen3, reward=starts_with_answer, name="single_turn", options={}, rewards=weighed
    )
    episodes = group(made, "yes!", size=2)
    assert episodes is not None
    assert episodes[0].reward == 3.0


def test_functions_judge_the_last_message(tiny_qwen3: Path) -> None:
    rewards = {"correct": {"function": "exact_match"}}
    episodes = group(runner(tiny_qwen3, turns=2, rewards=rewards), "no", "yes")
    assert episodes is not None
    assert episodes[0].rewards["correct"] == 1.0


@pytest.mark.parametrize(
    ("policy", "reward_", "excluded"),
    [("keep", 0.25, False), ("exclude", 0.25, True), ({"reward": -1.0}, -1.0, False)],
)
def test_what_a_truncated_episode_is_worth(
    tiny_qwen3: Path, policy: Any, reward_: float, excluded: bool
) -> None:
    made = runner(tiny_qwen3, turns=1, on_truncated=policy, min_group=1)
    episodes = asyncio.run(_judged(made, [one(made, "a"), one(made, "a-")]))
    assert episodes is not None
    assert [(e.reward, e.excluded) for e in episodes] == [(0.25, False), (reward_, excluded)]


async def _judged(made: EpisodeRunner, episodes: list[Episode]) -> list[Episode] | None:
    return await made.judge_group(episodes)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raises", "Script step raised ValueError: out of order"),
        ("nan", "Script step gave nan, which is no finite number, as the reward 'polite'"),
        ("bad opening", "Script reset gave a Prompt, not an Opening"),
        ("speaks for the model", "Script step spoke for the model"),
        ("silent", "Script step gave no message to go on from, and is not done"),
        ("hangs", "Script step took longer than 1 s"),
    ],
)
def test_a_failing_environment_ends_the_run_unless_told_otherwise(
    tiny_qwen3: Path, kind: str, message: str
) -> None:
    with pytest.raises(RolloutError, match=message):
        group(runner(tiny_qwen3, kind=kind, step_timeout_s=1), "a")


@pytest.mark.parametrize("kind", ["raises", "nan", "hangs"])
def test_a_failing_environment_is_counted_and_no_zero(tiny_qwen3: Path, kind: str) -> None:
    made = runner(tiny_qwen3, kind=kind, on_failure="drop", step_timeout_s=1)
    assert group(made, "a") is None
    assert made.take_counts() == {
        "failures/Script": 3.0,
        "rollout/groups_replaced": 1.0,
        "rollout/reward_processes_lost": 0.0,
    }
    assert "failures/Script" not in made.take_counts()


def test_a_failed_episode_may_be_begun_anew(tiny_qwen3: Path) -> None:
    made = runner(tiny_qwen3, kind="raises once", turns=1, retries=1)
    episode = one(made, "a")
    assert (episode.status, episode.rewards, len(SEEN)) == ("completed", {"polite": 0.25}, 2)
    assert made.take_counts()["failures/Script"] == 1.0


def test_a_failed_episode_may_have_a_fixed_reward(tiny_qwen3: Path) -> None:
    made = runner(tiny_qwen3, kind="raises", on_failure={"reward": -2.0})
    episodes = group(made, "a")
    assert episodes is not None
    assert [(e.reward, e.status, e.excluded) for e in episodes] == [(-2.0, "failed", False)] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("not_a_number", "bad gave nan, which is no finite number"),
        ("not_even_a_number", "bad gave '0.5', which is no finite number"),
        ("wrong_number", "bad gave 1 numbers for 3 texts"),
        ("only_yes", "bad raised KeyError: 'no'"),
        ("hangs", "bad took longer than 1 s"),
    ],
)
def test_a_failing_reward_ends_the_run_unless_told_otherwise(
    tiny_qwen3: Path, name: str, message: str
) -> None:
    made = runner(tiny_qwen3, turns=1, rewards={"bad": reward(name)}, reward_timeout_s=1)
    with pytest.raises(RolloutError, match=f"{message}, at the prompt 'hi'"):
        group(made, "no")


@pytest.mark.parametrize("name", ["not_a_number", "wrong_number", "hangs"])
def test_a_failing_reward_is_counted_and_no_zero(tiny_qwen3: Path, name: str) -> None:
    made = runner(
        tiny_qwen3,
        turns=1,
        rewards={"bad": reward(name), "correct": {"function": "exact_match"}},
        reward_timeout_s=1,
        on_failure="drop",
    )
    assert group(made, "yes") is None
    assert made.take_counts()["failures/bad"] == 3.0


def test_one_failed_reward_leaves_the_others_of_its_group(tiny_qwen3: Path) -> None:
    rewards = {"bad": reward("only_yes")}
    made = runner(tiny_qwen3, turns=1, rewards=rewards, on_failure="drop", retries=1)
    acted = [one(made, text) for text in ("yes", "no", "yes")]
    ASKED.clear()
    episodes = asyncio.run(made.judge_group(acted))
    assert episodes is not None
    assert [(e.status, e.excluded) for e in episodes] == [
        ("completed", False),
        ("failed", True),
        ("completed", False),
    ]
    assert math.isnan(episodes[1].reward)
    assert episodes[0].reward == 1.25
    # The one that failed was asked once more, and both times were counted.
    assert sorted(ASKED) == ["no", "no", "yes", "yes"]
    assert made.take_counts()["failures/bad"] == 2.0


def test_a_run_in_which_nothing_works_ends(tiny_qwen3: Path) -> None:
    made = runner(tiny_qwen3, kind="raises", on_failure="drop")

    async def go_on() -> None:
        while True:
            assert await made.run_group(says("a"), PROMPT, group_id=0, group_size=2) is None

    match = "64 groups in a row had fewer .* status: failed; the last failure: Script step raised"
    with pytest.raises(RolloutError, match=match):
        asyncio.run(go_on())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "single_turn", "rewards": {"x": {"weight": 2.0}}}, "nothing judges"),
        ({"name": "nothing"}, "'nothing' is unknown; use one of .*'guess'.* or 'package"),
        ({"name": f"{HERE}:Nothing"}, "cannot be imported"),
        ({"name": f"{HERE}:Script", "options": {"turn": 1}}, "does not take them: .*'turn'"),
        ({"name": "guess", "options": {"largest": 99}}, "cannot be made .*: largest is 99"),
        ({"name": "builtins:dict"}, r"has no `async def reset\(self, task, seed\)`"),
        ({"name": f"{HERE}:Odd"}, "step of .*Odd cannot be called as .* too many positional"),
        ({"rewards": {"x": {"function": "nothing"}}}, "rewards.x: reward 'nothing' is unknown"),
        ({"rewards": {"x": {"function": "builtins:len"}}}, "rewards.x: .*cannot be called with"),
        ({"rewards": {"x": {"function": "task"}}}, "rewards.x: the task has no reward of its own"),
    ],
)
def test_what_cannot_work_is_known_before_anything_starts(
    tiny_qwen3: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        runner(tiny_qwen3, **({"options": {}} | config))


class Odd(Script):
    async def step(self, message: Message) -> Reply:  # type: ignore[override]
        return Reply(done=True)


def test_prompts_are_counted_as_they_are_rendered(tmp_path: Path, tiny_qwen3: Path) -> None:
    assert runner(tiny_qwen3).count_tokens(PROMPT) == 2
    made = runner(chat_directory(tmp_path, CHATML))
    # <|im_start|> user\n hi <|im_end|> \n <|im_start|> assistant\n
    assert made.count_tokens(PROMPT) == 1 + 5 + 2 + 1 + 1 + 1 + 10


def test_token_ids_go_to_the_generator_as_one_array(tiny_qwen3: Path) -> None:
    model = ScriptedModel(tiny_qwen3, ["a"])
    made = runner(tiny_qwen3, turns=1)
    asyncio.run(made.run_episode(model.generate_one, PROMPT, group_id=0, index=0))
    assert np.asarray(model.requests[0].token_ids).dtype == np.int32
