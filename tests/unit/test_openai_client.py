"""Agents that use OpenAI's own client."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from forge_trainer.config import EnvironmentConfig, GrpoConfig
from forge_trainer.config.load import load_config
from forge_trainer.environments import EpisodeRunner, make_episode_runner
from forge_trainer.environments.acting import Generate
from forge_trainer.functional.seeds import asked_seed
from forge_trainer.types import (
    Completion,
    Episode,
    GenerationRequest,
    Message,
    Prompt,
    SamplingParams,
    ToolCall,
)
from tests.chat import CHATML, ScriptedModel, chat_directory
from tests.waiting import until

HERE = "tests.unit.test_openai_client"
END = "<|im_end|>"
PROMPT = Prompt("What is 2 + 3?", "5")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]
CALL = '<tool_call>{"name":"add", "arguments":{"a":2,"b":3}}</tool_call>'
START = "<|im_start|>"

Script = Callable[[Any], Awaitable[Any]]
SCRIPT: list[Script] = []


@pytest.fixture(autouse=True)
def no_script() -> Iterator[None]:
    SCRIPT.clear()
    yield
    SCRIPT.clear()


async def scripted(*, base_url: str, api_key: str, prompt: Prompt) -> Any:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        return await SCRIPT[0](client)


def blocking(*, base_url: str, api_key: str, prompt: Prompt) -> float:
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        answer = client.chat.completions.create(model="any", messages=[user(prompt.text)])
        return float(answer.choices[0].message.content == prompt.answer)


def user(content: str) -> Any:
    return {"role": "user", "content": content}


def make_runner(folder: Path, agent: str = "scripted") -> EpisodeRunner:
    return make_episode_runner(
        EnvironmentConfig(name="agent", options={"function": f"{HERE}:{agent}"}),
        None,
        model_dir=folder,
        sampling=SamplingParams(max_completion_tokens=100, temperature=0.7),
        max_prompt_tokens=1000,
        seed=3,
    )


def run(made: EpisodeRunner, generate: Generate) -> Episode:
    """One episode; the server is closed after it."""

    async def one() -> Episode:
        try:
            return await made.run_episode(generate, PROMPT, group_id=5, index=2)
        finally:
            await made.close()

    return asyncio.run(one())


def let(tmp_path: Path, script: Script, *sayings: str) -> tuple[Episode, ScriptedModel]:
    """The episode in which an agent follows the script and the model says these things."""
    SCRIPT.append(script)
    folder = chat_directory(tmp_path, CHATML)
    model = ScriptedModel(folder, [saying + END for saying in sayings], stop=END)
    return run(make_runner(folder), model.generate_one), model


async def call_a_tool(client: Any) -> dict[str, float]:
    """As any agent does: ask, do what is wanted, ask again."""
    messages: list[Any] = [user(PROMPT.text)]
    ask = client.chat.completions.create
    said = (await ask(model="any", messages=messages, tools=TOOLS)).choices[0]
    assert said.finish_reason == "tool_calls"
    (call,) = said.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 2, "b": 3}')
    messages += [said.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
    said = (await ask(model="any", messages=messages, tools=TOOLS)).choices[0]
    assert said.finish_reason == "stop"
    # Another way to keep what was said.
    messages += [said.message.model_dump(), user("Sure?")]
    said = (await ask(model="any", messages=messages, tools=TOOLS)).choices[0]
    return {"right": said.message.content == PROMPT.answer}


def test_a_conversation_with_a_tool_is_trained_on_as_it_was_sampled(tmp_path: Path) -> None:
    episode, model = let(tmp_path, call_a_tool, CALL, "so 5", "5")
    (transcript,) = episode.transcripts
    assert model.marked(transcript).partition(END + "\n")[2] == (
        f"{START}user\nWhat is 2 + 3?{END}\n{START}assistant\n«{CALL}{END}»\n"
        f"{START}user\n<tool_response>5</tool_response>{END}\n{START}assistant\n«so 5{END}»\n"
        f"{START}user\nSure?{END}\n{START}assistant\n«5{END}»"
    )
    said = np.asarray(transcript.sampled)
    lengths = [len(model.ids(text + END)) for text in (CALL, "so 5", "5")]
    logprobs = [-0.5] * lengths[0] + [-1.5] * lengths[1] + [-2.5] * lengths[2]
    versions = [0] * lengths[0] + [1] * lengths[1] + [2] * lengths[2]
    assert np.asarray(transcript.logprobs)[said].tolist() == logprobs
    assert np.asarray(transcript.policy_versions)[said].tolist() == versions
    assert not np.asarray(transcript.logprobs)[~said].any()
    assert transcript.temperature == 0.7
    assert (episode.status, episode.num_turns, episode.rewards) == ("completed", 3, {"right": 1.0})
    assert episode.messages[1].tool_calls == (ToolCall("add", {"a": 2, "b": 3}, "call00000"),)
    assert episode.messages[2] == Message("tool", "5", tool_call_id="call00000")


def test_seeds_are_those_of_the_episode(tmp_path: Path) -> None:
    _, model = let(tmp_path, call_a_tool, CALL, "so 5", "5")
    for request in model.requests:
        prompt = np.asarray(request.token_ids).tobytes()
        wanted = asked_seed(3, group_id=5, index=2, prompt=prompt, repetition=0)
        assert request.seed == wanted
    assert len({request.seed for request in model.requests}) == 3


def test_a_history_that_was_rewritten_gives_two_sequences(tmp_path: Path) -> None:
    async def script(client: Any) -> None:
        ask = client.chat.completions.create
        said = (await ask(model="any", messages=[user("hi")])).choices[0].message
        summary = {"role": "assistant", "content": f"I said {said.content}"}
        await ask(model="any", messages=[user("hi"), summary, user("and?")])

    episode, model = let(tmp_path, script, "yes", "no")
    assert list(map(model.marked, episode.transcripts)) == [
        f"{START}user\nhi{END}\n{START}assistant\n«yes{END}»",
        f"{START}user\nhi{END}\n{START}assistant\nI said yes{END}\n"
        f"{START}user\nand?{END}\n{START}assistant\n«no{END}»",
    ]


def test_answers_may_be_streamed(tmp_path: Path) -> None:
    async def script(client: Any) -> None:
        ask = client.chat.completions.create
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [c async for c in await ask(model="any", messages=[user("hi")], **options)]
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "yes"
        assert chunks[-1].usage.completion_tokens == 4
        async with client.chat.completions.stream(
            model="any", messages=[user("2 + 3?")], tools=TOOLS
        ) as stream:
            (call,) = (await stream.get_final_completion()).choices[0].message.tool_calls
        assert call.function.arguments == '{"a": 2, "b": 3}'

    episode, _ = let(tmp_path, script, "yes", CALL)
    assert episode.num_turns == 2


def test_log_probs_are_told_to_who_asks(tmp_path: Path) -> None:
    async def script(client: Any) -> None:
        ask = client.chat.completions.create
        answer = await ask(model="any", messages=[user("hi")], logprobs=True)
        told = [one.logprob for one in answer.choices[0].logprobs.content]
        assert told == [-0.5] * answer.usage.completion_tokens

    let(tmp_path, script, "yes")


def test_errors_are_the_clients_own(tmp_path: Path) -> None:
    async def script(client: Any) -> None:
        ask = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="top_p = 0.9 cannot be had") as refused:
            await ask(model="any", messages=[user("hi")], top_p=0.9)
        assert (refused.value.code, refused.value.param) == ("unsupported_value", "top_p")
        with pytest.raises(openai.BadRequestError) as too_long:
            await ask(model="any", messages=[user("hi" * 1000)])
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()
        assert [model.id async for model in client.models.list()] == ["policy"]
        await ask(model="any", messages=[user("hi")])

    episode, _ = let(tmp_path, script, "yes")
    assert (episode.status, episode.num_turns) == ("completed", 1)


def test_a_client_that_gives_up_takes_its_request_back(tmp_path: Path) -> None:
    async def script(client: Any) -> None:
        ask = client.chat.completions.create
        asked = asyncio.create_task(ask(model="any", messages=[user("hi")]))
        await until(lambda: len(waiting) == 1)
        asked.cancel()
        await until(lambda: len(waiting) == 0)
        await ask(model="any", messages=[user("hi")])

    async def late_at_first(request: GenerationRequest) -> Completion:
        if waited:
            return await model.generate_one(request)
        waited.append(request.id)
        waiting.append(request.id)
        try:
            await asyncio.Event().wait()
        finally:
            waiting.remove(request.id)
        raise AssertionError

    waited: list[str] = []
    waiting: list[str] = []
    SCRIPT.append(script)
    folder = chat_directory(tmp_path, CHATML)
    model = ScriptedModel(folder, ["yes" + END], stop=END)
    episode = run(make_runner(folder), late_at_first)
    assert (episode.status, episode.num_turns) == ("completed", 1)


def test_a_blocking_client_works_on_its_thread(tmp_path: Path) -> None:
    folder = chat_directory(tmp_path, CHATML)
    model = ScriptedModel(folder, ["5" + END], stop=END)
    episode = run(make_runner(folder, "blocking"), model.generate_one)
    assert episode.rewards == {"agent": 1.0}


DOCUMENT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def test_the_agent_of_the_document_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its config, under the name that it has there."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    (config,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text("run: {folder: out, steps: 3}\nmodel: {tiny: {}}\n" + config)
    made = make_episode_runner(
        load_config(GrpoConfig, file).environment,
        None,
        model_dir=chat_directory(tmp_path, CHATML),
        sampling=SamplingParams(max_completion_tokens=100),
        max_prompt_tokens=1000,
        seed=3,
    )
    model = ScriptedModel(tmp_path, [CALL + END, "5" + END], stop=END)
    episode = run(made, model.generate_one)
    assert (episode.rewards, episode.num_turns) == ({"agent": 1.0}, 2)
