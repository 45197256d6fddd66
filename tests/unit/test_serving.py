"""Episodes of agents that ask for completions over HTTP: whose they are, what becomes of them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from forge_trainer.config import EnvironmentConfig
from forge_trainer.environments import EpisodeRunner, make_episode_runner
from forge_trainer.environments.acting import Acting, ActingRules, Generate, Place
from forge_trainer.environments.failures import EpisodeError, Failures
from forge_trainer.environments.renderer import make_renderer
from forge_trainer.environments.serving.asked import Asked
from forge_trainer.environments.serving.session import Session
from forge_trainer.errors import ConfigError, EngineError, RolloutError
from forge_trainer.functional.seeds import asked_seed, opening_seed
from forge_trainer.types import (
    Completion,
    Episode,
    GenerationRequest,
    Message,
    Prompt,
    SamplingParams,
)
from tests.chat import CHATML, STRIPS_THOUGHTS, ScriptedModel, chat_directory
from tests.waiting import A_HANG_S, until

HERE = "tests.unit.test_serving"
PROMPT = Prompt("hi", "yes")
END = "<|im_end|>"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ADD_CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


HI = [user("hi")]


class Client:
    """Asks like an agent; `body` of the last answer, whatever it was."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.headers = {"Authorization": f"Bearer {api_key}"}

    async def post(self, body: Any, path: str = "/chat/completions") -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession(headers=self.headers) as session,
            session.post(self.base_url + path, json=body) as response,
        ):
            return response.status, await response.json()

    async def say(self, messages: Sequence[Any], **more: Any) -> dict[str, Any]:
        """The message that is answered.

        Raises:
            AskingError: an error was.
        """
        status, body = await self.post({"messages": list(messages), **more})
        if status != 200:
            raise AskingError(status, body["error"]["code"])
        message: dict[str, Any] = body["choices"][0]["message"]
        return message

    async def talk(self, *said: str, first: Sequence[Any] = HI, **more: Any) -> list[Any]:
        """A conversation that goes on with what is said; all of its messages."""
        messages = [*first, await self.say(first, **more)]
        for text in said:
            messages.append(user(text))
            messages.append(await self.say(messages, **more))
        return messages


class AskingError(Exception):
    """An error for an answer."""


Script = Callable[..., Any]
Played = tuple[Episode, ScriptedModel]
SCRIPT: list[Script] = []
"""What the agent of the test does."""


async def scripted(*, base_url: str, api_key: str, prompt: Prompt, seed: int, **more: Any) -> Any:
    return await SCRIPT[0](Client(base_url, api_key), prompt=prompt, seed=seed, **more)


@pytest.fixture(autouse=True)
def no_script() -> Iterator[None]:
    SCRIPT.clear()
    yield
    SCRIPT.clear()


def make_runner(
    folder: Path, agent: str = "scripted", *, greedy: bool = False, **config: Any
) -> EpisodeRunner:
    options = {"function": f"{HERE}:{agent}"} | config.pop("options", {})
    max_prompt_tokens = config.pop("max_prompt_tokens", 1000)
    return make_episode_runner(
        EnvironmentConfig.model_validate({"name": "agent", "options": options} | config),
        config.pop("task_reward", None),
        model_dir=folder,
        sampling=SamplingParams(max_completion_tokens=100, temperature=0.7),
        max_prompt_tokens=max_prompt_tokens,
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return chat_directory(tmp_path, CHATML)


def let(folder: Path, script: Script, *sayings: str, **config: Any) -> Played:
    """The episode in which an agent follows the script and the model says these things."""
    SCRIPT.append(script)
    model = ScriptedModel(folder, [saying + END for saying in sayings], stop=END)
    return run(make_runner(folder, **config), model.generate_one), model


def test_a_conversation_of_two_turns_is_one_sequence_with_two_targets(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> float:
        messages = await client.talk("sure?")
        assert [m["content"] for m in messages] == ["hi", "yes", "sure?", "no"]
        return 0.25

    episode, model = let(folder, script, "yes", "no")
    (transcript,) = episode.transcripts
    assert model.marked(transcript) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n«no<|im_end|>»"
    )
    assert transcript.temperature == 0.7
    said = np.asarray(transcript.sampled)
    assert np.asarray(transcript.logprobs)[said].tolist() == [-0.5] * 4 + [-1.5] * 3
    assert np.asarray(transcript.policy_versions)[said].tolist() == [0] * 4 + [1] * 3
    assert [m.content for m in episode.messages] == ["hi", "yes", "sure?", "no"]
    assert (episode.status, episode.num_turns) == ("completed", 2)
    assert (episode.rewards, episode.metrics) == ({"agent": 0.25}, {"conversations": 1.0})


def test_sampled_tokens_are_never_made_anew(folder: Path) -> None:
    """The tokenizer would merge the `ab` that was sampled as two tokens."""

    async def script(client: Client, **_: Any) -> None:
        await client.talk("ab")

    episode, model = let(folder, script, "ab", "ab")
    (transcript,) = episode.transcripts
    sampled = np.asarray(transcript.token_ids)[np.asarray(transcript.sampled)]
    assert sampled.tolist() == model.ids(f"ab{END}") * 2
    first, second = (np.asarray(request.token_ids).tolist() for request in model.requests)
    assert second[: len(first) + 2] == first + model.ids("ab")
    assert len(model.tokenizer.encode("ab").ids) == 1


def test_a_tool_call_comes_back_as_it_was_made(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        said = await client.say(HI, tools=[ADD])
        assert (said["content"], len(said["tool_calls"])) == (None, 1)
        (call,) = said["tool_calls"]
        assert (call["id"], call["function"]["arguments"]) == ("call00000", '{"a": 1}')
        answer = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        said = await client.say([*HI, said, answer], tools=[ADD])
        # Its own in the episode: frameworks look calls up by their ids.
        assert said["tool_calls"][0]["id"] == "call00001"

    episode, model = let(folder, script, ADD_CALL, ADD_CALL)
    (transcript,) = episode.transcripts
    assert model.marked(transcript).endswith(
        f"<|im_start|>assistant\n«{ADD_CALL}<|im_end|>»\n"
        "<|im_start|>user\n<tool_response>2</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n«{ADD_CALL}<|im_end|>»"
    )
    assert episode.metrics == {"conversations": 1.0, "tool_calls": 2.0}


@pytest.mark.parametrize(
    ("history", "shown"),
    [
        ([user("hi"), assistant("YES"), user("?")], "user\nhi{}\nassistant\nYES{}\nuser\n?{}\n"),
        ([user("Hi"), assistant("yes"), user("?")], "user\nHi{}\nassistant\nyes{}\nuser\n?{}\n"),
        ([user("?")], "user\n?{}\n"),
        (
            [user("hi"), assistant("yes"), user("a"), assistant("b"), user("?")],
            "user\nhi{}\nassistant\nyes{}\nuser\na{}\nassistant\nb{}\nuser\n?{}\n",
        ),
    ],
    ids=["answer rewritten", "question rewritten", "forgotten", "an answer of somebody else's"],
)
def test_a_history_that_was_rewritten_begins_a_sequence_of_its_own(
    folder: Path, history: list[Any], shown: str
) -> None:
    async def script(client: Client, **_: Any) -> None:
        await client.say(HI)
        await client.say(history)

    episode, model = let(folder, script, "yes", "no")
    first, second = map(model.marked, episode.transcripts)
    assert first == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»"
    plain = second.replace("<|im_start|>", "").replace(END, "{}")
    assert plain == shown + "assistant\n«no{}»"
    assert [m.content for m in episode.messages] == [m["content"] for m in history] + ["no"]
    assert episode.metrics["conversations"] == 2.0


def test_other_tools_begin_a_sequence_of_their_own(folder: Path) -> None:
    """The template shows them at the beginning."""

    async def script(client: Client, **_: Any) -> None:
        said = await client.say(HI, tools=[ADD])
        await client.say([*HI, said, user("?")])

    episode, _ = let(folder, script, "yes", "no")
    assert len(episode.transcripts) == 2


def test_a_template_that_rewrites_history_begins_a_sequence_of_its_own(tmp_path: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        await client.talk("sure?")

    folder = chat_directory(tmp_path, STRIPS_THOUGHTS)
    episode, model = let(folder, script, "<think>hm</think>yes", "no")
    first, second = map(model.marked, episode.transcripts)
    assert "«<think>hm</think>yes" in first
    assert "hm" not in second


def test_a_point_that_was_gone_on_from_twice_is_trained_on_once(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        messages = await client.talk("a?")
        await client.say([*messages[:2], user("b?")])
        await client.say([*messages, user("c?")])

    episode, model = let(folder, script, "ab", "a", "b", "c")
    start = "<|im_start|>"
    hi, to_go_on = f"{start}user\nhi{END}\n", f"{start}assistant\n"
    a, b, c = (f"\n{start}user\n{x}?{END}\n{to_go_on}«{x}{END}»" for x in "abc")
    assert list(map(model.marked, episode.transcripts)) == [
        f"{hi}{to_go_on}«ab{END}»{a}{c}",
        f"{hi}{to_go_on}ab{END}{b}",
    ]
    # In the tokens that were sampled, which the tokenizer would merge.
    known = np.asarray(model.requests[2].token_ids).tolist()
    first = np.asarray(model.requests[0].token_ids).tolist()
    assert known[: len(first) + 2] == first + model.ids("ab")


def test_several_conversations_at_one_time_do_not_mix(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        await asyncio.gather(*(client.talk("more", first=[user(name)]) for name in "xyz"))

    async def echo(request: GenerationRequest) -> Completion:
        shown = np.asarray(request.token_ids).tolist()
        text = model.tokenizer.decode(shown, skip_special_tokens=False)
        ids = model.ids(f"{text.count('assistant')}{text[17]}{END}")
        versions, logprobs = [0] * len(ids), [-1.0] * len(ids)
        said = model.tokenizer.decode(ids)
        return Completion(request.token_ids, ids, logprobs, versions, said, 0.7, "stop")

    SCRIPT.append(script)
    model = ScriptedModel(folder, [], stop=END)
    episode = run(make_runner(folder), echo)
    told = sorted(map(model.marked, episode.transcripts))
    for name, text in zip("xyz", told, strict=True):
        assert text.startswith(f"<|im_start|>user\n{name}{END}")
        assert (text.count(f"«1{name}{END}»"), text.count(f"«2{name}{END}»")) == (1, 1)
    assert episode.num_turns == 6


def test_seeds_follow_from_what_is_asked_and_not_from_when(folder: Path) -> None:
    """Numbers that must stay: a run goes on with the same ones."""
    assert asked_seed(3, group_id=5, index=2, prompt=b"a", repetition=0) == 2005415340221484093
    seeds = {
        asked_seed(run_seed, group_id=group_id, index=index, prompt=prompt, repetition=repetition)
        for run_seed, group_id, index, repetition in itertools.product((0, 1), repeat=4)
        for prompt in (b"", b"a")
    }
    assert len(seeds) == 32
    assert max(seeds) < 2**63

    async def script(client: Client, *, order: str, **_: Any) -> None:
        for name in order:
            await client.say([user(name)])

    def seeds_of(order: str) -> list[int]:
        SCRIPT.clear()
        _, model = let(folder, script, "yes", "yes", "yes", options={"order": order})
        assert {request.group for request in model.requests} == {"5"}
        prompt = np.asarray(model.requests[0].token_ids).tobytes()
        assert model.requests[0].seed == asked_seed(
            3, group_id=5, index=2, prompt=prompt, repetition=0
        )
        return [request.seed for request in model.requests]

    x, y, again = seeds_of("xyx")
    assert len({x, y, again}) == 3
    assert seeds_of("yxx") == [y, x, again]


def test_a_request_may_have_fewer_tokens_and_more_stop_strings(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        body = (await client.post({"messages": HI, "max_tokens": 2, "stop": "."}))[1]
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 2

    episode, model = let(folder, script, "yes")
    sampling = model.requests[0].sampling
    assert (sampling.max_completion_tokens, sampling.stop) == (2, (".",))
    # It was the agent's wish.
    assert episode.status == "completed"


def test_an_answer_that_was_cut_at_the_runs_limit_is_truncated(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        await client.say(HI, max_tokens=1000)

    episode, _ = let(folder, script, "y" * 200)
    assert (episode.status, episode.num_sampled) == ("truncated_completion", 100)


def test_a_stream_tells_the_whole_answer(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        body = {"messages": HI, "stream": True}
        async with (
            aiohttp.ClientSession(headers=client.headers) as session,
            session.post(client.base_url + "/chat/completions", json=body) as response,
        ):
            assert response.content_type == "text/event-stream"
            text = await response.text()
            assert '"content": "yes"' in text
            assert text.endswith("data: [DONE]\n\n")

    episode, _ = let(folder, script, "yes")
    assert episode.num_turns == 1


def test_who_has_no_key_of_an_episode_gets_nothing(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        strangers = [Client(client.base_url, key) for key in ("", "x", f"{client.api_key}x")]
        for other in [*strangers, *CLIENTS]:
            status, body = await other.post({"messages": HI})
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        await client.say(HI)
        CLIENTS.append(client)

    async def two() -> list[Episode]:
        episodes = [
            await made.run_episode(model.generate_one, PROMPT, group_id=5, index=index)
            for index in range(2)
        ]
        await made.close()
        return episodes

    CLIENTS.clear()
    SCRIPT.append(script)
    model = ScriptedModel(folder, ["yes" + END] * 2, stop=END)
    made = make_runner(folder)
    assert [e.num_turns for e in asyncio.run(two())] == [1, 1]
    # The second one was served at the same place, where the first one's key was of no use.
    assert len({client.base_url for client in CLIENTS}) == 1


CLIENTS: list[Client] = []


def test_what_is_not_served_is_an_error_in_openais_form(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        status, body = await client.post({}, path="/responses")
        assert (status, body["error"]["code"]) == (404, "not_served")
        status, body = await client.post({}, path="/models")
        assert (status, body["error"]["code"]) == (405, "not_served")
        async with (
            aiohttp.ClientSession(headers=client.headers) as session,
            session.get(client.base_url + "/models") as response,
        ):
            assert [model["id"] for model in (await response.json())["data"]] == ["policy"]
        await client.say(HI)

    let(folder, script, "yes")


def test_a_refused_request_is_told_and_counted(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        status, body = await client.post({"messages": HI, "top_p": 0.9})
        assert status == 400
        assert body["error"]["param"] == "top_p"
        assert body["error"]["type"] == "invalid_request_error"
        await client.say(HI)

    SCRIPT.append(script)
    model = ScriptedModel(folder, ["yes" + END], stop=END)
    made = make_runner(folder)
    assert run(made, model.generate_one).num_turns == 1
    assert made.take_counts()["failures/agent_request"] == 1.0


def test_messages_that_the_template_refuses_are_told_and_counted(tmp_path: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        with pytest.raises(AskingError, match="400, 'invalid_messages'"):
            await client.say([user("a"), user("b")])
        await client.say(HI)

    picky = "{% if messages | length == 2 %}{{ raise_exception('no two') }}{% endif %}" + CHATML
    SCRIPT.append(script)
    folder = chat_directory(tmp_path, picky)
    model = ScriptedModel(folder, ["yes" + END], stop=END)
    made = make_runner(folder)
    assert run(made, model.generate_one).status == "completed"
    assert made.take_counts()["failures/renderer"] == 1.0


@pytest.mark.parametrize(
    ("config", "sayings", "code", "turns", "status"),
    [
        ({"max_turns": 1}, ["yes"], "max_turns_exceeded", 1, "truncated_turns"),
        # 21 tokens to begin with, 4 said, and 24 that follow.
        ({"max_tokens": 49}, ["yes"], "context_length_exceeded", 1, "truncated_tokens"),
        ({"max_prompt_tokens": 40}, ["yes"], "context_length_exceeded", 1, "truncated_tokens"),
        ({"max_prompt_tokens": 10}, [], "context_length_exceeded", 0, "truncated_tokens"),
        (
            {"max_tool_calls": 1},
            [ADD_CALL] * 2,
            "max_tool_calls_exceeded",
            2,
            "truncated_tool_calls",
        ),
    ],
)
@pytest.mark.parametrize("catches", [True, False])
def test_a_limit_is_told_and_ends_the_episode_with_its_status(
    folder: Path,
    config: dict[str, Any],
    sayings: list[str],
    code: str,
    turns: int,
    status: str,
    catches: bool,
) -> None:
    async def script(client: Client, **_: Any) -> float:
        try:
            await client.talk("and?", "and?", "and?", tools=[ADD] if ADD_CALL in sayings else [])
        except AskingError as error:
            told.append(error.args)
            if not catches:
                raise RuntimeError("what do I do now?") from error
        # What was told once is told again.
        with pytest.raises(AskingError):
            await client.say([*HI, user("and?" * 20)])
        return 0.5

    told: list[object] = []
    episode, _ = let(folder, script, *sayings, **config)
    assert told == [(400, code)]
    assert (episode.status, episode.num_turns) == (status, turns)
    assert episode.rewards == ({"agent": 0.5} if catches else {})
    assert len(episode.transcripts) == (turns > 0)


def test_an_agent_that_shortens_its_conversation_goes_on(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        messages = await client.talk()
        with pytest.raises(AskingError, match="context_length_exceeded"):
            await client.say([*messages, user("and?")])
        await client.say([user("and?")])

    episode, _ = let(folder, script, "yes", "no", max_tokens=49)
    assert (episode.status, len(episode.transcripts)) == ("completed", 2)


def test_turns_under_way_count(folder: Path) -> None:
    """Two at one time, of which one is allowed."""

    async def script(client: Client, **_: Any) -> None:
        asked = [asyncio.create_task(client.say([user(name)])) for name in "ab"]
        ended = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = ended[0]
        assert isinstance(refused.exception(), AskingError)
        may_answer.set()
        await asyncio.wait(asked)

    async def patient(request: GenerationRequest) -> Completion:
        await may_answer.wait()
        return await model.generate_one(request)

    may_answer = asyncio.Event()
    SCRIPT.append(script)
    model = ScriptedModel(folder, ["yes" + END], stop=END)
    episode = run(make_runner(folder, max_turns=1), patient)
    assert (episode.status, episode.num_turns) == ("truncated_turns", 1)


class Never:
    """A generator that does not answer; what was taken back is kept."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.taken_back: list[str] = []

    async def generate_one(self, request: GenerationRequest) -> Completion:
        self.asked.append(request.id)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.taken_back.append(request.id)
            raise
        raise AssertionError


def test_a_client_that_goes_away_takes_its_request_back(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        asked = asyncio.create_task(client.say(HI))
        await until(lambda: len(never.asked) == 1)
        asked.cancel()
        await until(lambda: never.taken_back == never.asked)
        answers.append(await client.say(HI))

    async def second_time(request: GenerationRequest) -> Completion:
        if not never.asked:
            return await never.generate_one(request)
        return await model.generate_one(request)

    never, answers = Never(), list[Any]()
    SCRIPT.append(script)
    model = ScriptedModel(folder, ["yes" + END], stop=END)
    episode = run(make_runner(folder), second_time)
    assert answers[0]["content"] == "yes"
    # What was taken back has left nothing.
    assert (episode.status, episode.num_turns, len(episode.transcripts)) == ("completed", 1, 1)


def test_requests_that_are_left_at_the_end_are_taken_back(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        await client.say(HI)
        LEFT.append(asyncio.create_task(client.say([user("more")])))
        await until(lambda: len(never.asked) == 1)

    async def once(request: GenerationRequest) -> Completion:
        if not model.requests:
            return await model.generate_one(request)
        return await never.generate_one(request)

    async def one() -> Episode:
        episode = await made.run_episode(once, PROMPT, group_id=5, index=2)
        assert never.taken_back == never.asked
        with pytest.raises(AskingError, match="401"):
            await LEFT.pop()
        await made.close()
        return episode

    never, made = Never(), make_runner(folder)
    SCRIPT.append(script)
    model = ScriptedModel(folder, ["yes" + END], stop=END)
    assert asyncio.run(one()).num_turns == 1


LEFT: list[asyncio.Task[Any]] = []


def test_time_that_is_over_ends_an_episode_and_takes_its_request_back(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        await client.say(HI)

    never = Never()
    SCRIPT.append(script)
    episode = run(make_runner(folder, max_seconds=1), never.generate_one)
    assert (episode.status, episode.num_turns) == ("truncated_time", 0)
    assert never.taken_back == never.asked


@pytest.mark.parametrize("error", [EngineError("out of memory"), TimeoutError("late")])
def test_a_generator_that_fails_ends_the_run_as_itself(folder: Path, error: Exception) -> None:
    """Whatever the agent makes of it."""

    async def script(client: Client, **_: Any) -> float:
        with pytest.raises(AskingError, match="500, 'generator_failed'"):
            await client.say(HI)
        await asyncio.Event().wait()
        return 0.0

    async def broken(request: GenerationRequest) -> Completion:
        raise error

    SCRIPT.append(script)
    with pytest.raises(type(error), match=str(error)):
        run(make_runner(folder, on_failure="drop", max_seconds=A_HANG_S), broken)


async def raises(client: Client, **_: Any) -> None:
    await client.say(HI)
    raise ValueError("out of order")


async def nan(client: Client, **_: Any) -> float:
    await client.say(HI)
    return float("nan")


async def text(client: Client, **_: Any) -> Mapping[str, Any]:
    await client.say(HI)
    return {"good": 1.0, "bad": "1"}


async def asks_nothing(client: Client, **_: Any) -> float:
    return 1.0


async def hangs(client: Client, **_: Any) -> None:
    await client.say(HI)
    await asyncio.Event().wait()


async def exits(client: Client, **_: Any) -> None:
    raise SystemExit(1)


async def cancels_itself(client: Client, **_: Any) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (raises, "scripted raised ValueError: out of order"),
        (nan, "scripted gave nan, which is no finite number, as the reward 'agent'"),
        (text, "scripted gave '1', which is no finite number, as the reward 'bad'"),
        (asks_nothing, "scripted ended without an answer of the model's"),
        (hangs, "scripted took longer than 1 s without asking for anything"),
        (exits, "scripted raised SystemExit: 1"),
        (cancels_itself, "scripted raised CancelledError"),
    ],
)
def test_an_agent_that_fails_is_counted_and_ends_the_run_unless_told_otherwise(
    folder: Path, script: Script, message: str
) -> None:
    config: dict[str, Any] = {"step_timeout_s": 1} if script is hangs else {}
    with pytest.raises(RolloutError, match=message):
        let(folder, script, "yes", **config)
    SCRIPT[:] = [script]
    model = ScriptedModel(folder, ["yes" + END], stop=END)
    made = make_runner(folder, on_failure="drop", **config)
    assert run(made, model.generate_one).status == "failed"
    assert made.take_counts()["failures/scripted"] == 1.0


def test_a_request_that_takes_long_is_not_the_agents_fault(folder: Path) -> None:
    """Its time between requests does not run meanwhile, however long that is."""
    rules = ActingRules(
        limits=EnvironmentConfig(),
        renderer=make_renderer(EnvironmentConfig(), folder),
        sampling=SamplingParams(max_completion_tokens=8),
        max_prompt_tokens=1000,
        seed=3,
    )

    async def one() -> None:
        never = Never()
        acting = Acting(rules, Place(PROMPT, group_id=5, index=2), never.generate_one)
        session = Session(acting, Failures())
        asking = asyncio.create_task(session.answer(Asked((Message("user", "hi"),))))
        await until(lambda: len(never.asked) == 1)
        watching = asyncio.create_task(session.watch(name="slow", timeout_s=0.001))
        await asyncio.sleep(0.1)
        assert not watching.done()
        asking.cancel()
        with pytest.raises(EpisodeError, match="slow took longer than 0.001 s"):
            await watching
        await session.end()

    asyncio.run(one())


def test_a_failed_episode_is_begun_anew_with_the_same_seeds(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        CLIENTS.append(client)
        await client.say(HI)
        if len(CLIENTS) == 1:
            raise ValueError

    CLIENTS.clear()
    episode, model = let(folder, script, "yes", "no", retries=1)
    assert (episode.status, episode.num_turns) == ("completed", 1)
    assert model.requests[0].seed == model.requests[1].seed


def test_rewards_of_an_agent_are_weighted_by_name(folder: Path) -> None:
    async def script(client: Client, *, prompt: Prompt, seed: int) -> Mapping[str, float]:
        seeds.append(seed)
        said = await client.say([user(prompt.text)])
        return {"right": said["content"] == prompt.answer, "short": 0.5}

    async def group() -> list[Episode] | None:
        episodes = await made.run_group(model.generate_one, PROMPT, group_id=5, group_size=2)
        await made.close()
        return episodes

    seeds: list[int] = []
    SCRIPT.append(script)
    model = ScriptedModel(folder, ["yes" + END] * 2, stop=END)
    rewards = {"right": {"weight": 2.0}, "last": {"function": "exact_match", "weight": 4.0}}
    made = make_runner(folder, rewards=rewards)
    episodes = asyncio.run(group())
    assert episodes is not None
    assert [e.rewards for e in episodes] == [{"right": 1.0, "short": 0.5, "last": 1.0}] * 2
    assert [e.reward for e in episodes] == [2.0 + 0.5 + 4.0] * 2
    # Their worlds begin alike; what they sample does not.
    assert seeds == [opening_seed(3, group_id=5)] * 2
    assert len({request.seed for request in model.requests}) == 2


def blocking(*, base_url: str, api_key: str, prompt: Prompt, how: str) -> float:
    """Not async: on a thread of its own."""
    THREADS.append(threading.current_thread())
    if how == "stops":
        raise StopIteration
    if how == "exits":
        raise SystemExit(3)
    if how == "hangs":
        assert LET_GO.wait(A_HANG_S)
        with pytest.raises(AskingError, match="401"):
            asyncio.run(Client(base_url, api_key).say(HI))
        LEARNT.set()
        return 0.0
    asyncio.run(Client(base_url, api_key).talk("more"))
    return 0.75


THREADS: list[threading.Thread] = []
LET_GO, LEARNT = threading.Event(), threading.Event()


def block(folder: Path, how: str, **config: Any) -> Episode:
    THREADS.clear()
    model = ScriptedModel(folder, ["yes" + END, "no" + END], stop=END)
    return run(make_runner(folder, "blocking", options={"how": how}, **config), model.generate_one)


def test_a_function_that_blocks_has_a_thread_of_its_own(folder: Path) -> None:
    episode = block(folder, "works")
    assert (episode.status, episode.rewards) == ("completed", {"agent": 0.75})
    assert THREADS[0] is not threading.main_thread()
    with pytest.raises(RolloutError, match="blocking raised StopIteration"):
        block(folder, "stops")
    with pytest.raises(RolloutError, match="blocking raised SystemExit: 3"):
        block(folder, "exits")


def test_a_thread_that_hangs_is_left_behind_with_a_key_that_opens_nothing(folder: Path) -> None:
    async def one() -> Episode:
        made = make_runner(folder, "blocking", options={"how": "hangs"}, max_seconds=1)
        model = ScriptedModel(folder, ["yes" + END, "no" + END], stop=END)
        episode = await made.run_episode(model.generate_one, PROMPT, group_id=5, index=2)
        assert THREADS[-1].daemon
        LET_GO.set()
        await until(LEARNT.is_set)
        await made.close()
        return episode

    THREADS.clear()
    assert asyncio.run(one()).status == "truncated_time"
    THREADS[-1].join(A_HANG_S)


def takes_too_little(*, base_url: str, prompt: Prompt) -> None: ...


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": None}, "either `function`, .* or `command`"),
        ({"command": ["python"]}, "either `function`, .* or `command`"),
        ({"function": None, "command": "python agent.py"}, "a list of words is wanted"),
        ({"function": None, "command": ["no-such-program"]}, "no program 'no-such-program'"),
        ({"function": "nowhere:agent"}, "environment.options.function .* cannot be imported"),
        ({"function": f"{HERE}:takes_too_little"}, "cannot be called with base_url, api_key"),
        ({"function": f"{HERE}:blocking"}, "missing a required .*'how'"),
        ({"function": f"{HERE}:blocking", "how": "", "why": ""}, "unexpected .*'why'"),
        ({"host": "0.0.0.0"}, "host is '0.0.0.0'; give the one address"),
    ],
)
def test_what_cannot_work_is_known_before_anything_starts(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_runner(folder, options=options)


def test_an_address_that_is_not_here_ends_the_run(folder: Path) -> None:
    made = make_runner(folder, options={"host": "203.0.113.1"})
    with pytest.raises(RolloutError, match="cannot listen at 203.0.113.1"):
        run(made, Never().generate_one)


def test_nothing_listens_after_the_end(folder: Path) -> None:
    async def script(client: Client, **_: Any) -> None:
        CLIENTS.append(client)
        await client.say(HI)

    CLIENTS.clear()
    let(folder, script, "yes")
    with pytest.raises(aiohttp.ClientConnectorError):
        asyncio.run(CLIENTS[0].say(HI))
