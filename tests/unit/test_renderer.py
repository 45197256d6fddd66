"""Between messages and tokens: rendering, parsing, and bridges that never render twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from forge_trainer.config import EnvironmentConfig
from forge_trainer.environments.acting import Acting, ActingRules, Place
from forge_trainer.environments.renderer import ChatRenderer, TextRenderer, make_renderer
from forge_trainer.environments.tool_calls import parse_message
from forge_trainer.errors import ConfigError
from forge_trainer.hf import load_tokenizer
from forge_trainer.types import (
    Completion,
    Episode,
    Message,
    Opening,
    Prompt,
    Reply,
    SamplingParams,
    StopReason,
    ToolCall,
    Transcript,
)
from tests.chat import CHATML, LLAMA3, STRIPS_THOUGHTS, ScriptedModel, chat_directory

ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}


class Answers:
    """An environment that says one thing after another."""

    def __init__(self, answers: Sequence[Message], tools: bool = False) -> None:
        self._answers = iter(answers)
        self._tools = (ADD,) if tools else ()

    async def reset(self, task: Prompt, seed: int) -> Opening:
        return Opening((Message("user", task.text),), self._tools)

    async def step(self, message: Message, stop_reason: StopReason) -> Reply:
        answer = next(self._answers, None)
        return Reply(done=True) if answer is None else Reply((answer,))

    async def close(self) -> None:
        pass


def talk(folder: Path, model: ScriptedModel, environment: Answers, **limits: int) -> Episode:
    """What comes of "hi"."""
    rules = ActingRules(
        limits=EnvironmentConfig(**limits),
        renderer=make_renderer(EnvironmentConfig(), folder),
        sampling=SamplingParams(max_completion_tokens=100, temperature=0.7),
        max_prompt_tokens=1000,
        seed=3,
    )
    acting = Acting(rules, Place(Prompt("hi", ""), group_id=5, index=2), model.generate_one)
    return acting.episode(asyncio.run(acting.act(environment)))


def user(content: str) -> Message:
    return Message("user", content)


def test_two_turns_of_chatml_are_one_sequence_with_two_targets(tmp_path: Path) -> None:
    folder = chat_directory(tmp_path, CHATML)
    model = ScriptedModel(folder, ["yes<|im_end|>", "no<|im_end|>"], stop="<|im_end|>")
    episode = talk(folder, model, Answers([user("sure?")]))
    (transcript,) = episode.transcripts
    assert model.marked(transcript) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n«no<|im_end|>»"
    )
    assert transcript.temperature == 0.7
    said = np.asarray(transcript.sampled)
    assert np.asarray(transcript.logprobs)[said].tolist() == [-0.5] * 4 + [-1.5] * 3
    assert np.asarray(transcript.policy_versions)[said].tolist() == [0] * 4 + [1] * 3
    assert set(np.asarray(transcript.policy_versions)[~said]) == {-1}
    assert not np.asarray(transcript.logprobs)[~said].any()
    assert [m.content for m in episode.messages] == ["hi", "yes", "sure?", "no"]


def test_a_whole_conversation_has_the_tokens_of_its_rendering(tmp_path: Path) -> None:
    """Where the sampled tokens are those that the tokenizer would make."""
    folder = chat_directory(tmp_path, CHATML)
    model = ScriptedModel(folder, ["yes<|im_end|>", "no<|im_end|>"], stop="<|im_end|>")
    (transcript,) = talk(folder, model, Answers([user("ab?")])).transcripts
    chat = [("user", "hi"), ("assistant", "yes"), ("user", "ab?"), ("assistant", "no")]
    whole = load_tokenizer(folder).apply_chat_template(
        [{"role": role, "content": content} for role, content in chat], return_dict=False
    )
    assert [*np.asarray(transcript.token_ids), *model.ids("\n")] == whole


def test_sampled_tokens_that_the_tokenizer_would_merge_stay_as_they_were(tmp_path: Path) -> None:
    folder = chat_directory(tmp_path, CHATML)
    model = ScriptedModel(folder, ["ab<|im_end|>", "ab<|im_end|>"], stop="<|im_end|>")
    a, b = model.ids("a"), model.ids("b")
    assert len(model.tokenizer.encode("ab").ids) == 1
    (transcript,) = talk(folder, model, Answers([user("ab")])).transcripts
    sampled = np.asarray(transcript.token_ids)[np.asarray(transcript.sampled)]
    assert sampled.tolist() == [*a, *b, *model.ids("<|im_end|>")] * 2
    second = list(np.asarray(model.requests[1].token_ids))
    assert second[: len(model.requests[0].token_ids) + 2][-2:] == [*a, *b]


def test_a_turn_that_was_cut_is_ended_by_tokens_that_are_no_targets(tmp_path: Path) -> None:
    folder = chat_directory(tmp_path, CHATML)
    model = ScriptedModel(folder, ["and the", "no<|im_end|>"], stop="<|im_end|>")
    (transcript,) = talk(folder, model, Answers([user("?")])).transcripts
    assert "«and the»<|im_end|>\n<|im_start|>user\n?<|im_end|>" in model.marked(transcript)


def test_a_template_that_trims_does_not_touch_what_was_sampled(tmp_path: Path) -> None:
    folder = chat_directory(tmp_path, LLAMA3)
    model = ScriptedModel(folder, [" yes \n<|eot|>", "no<|eot|>"], stop="<|eot|>")
    (transcript,) = talk(folder, model, Answers([user(" sure ")])).transcripts
    assert model.marked(transcript) == (
        "<|start|>user<|header|>\n\nhi<|eot|><|start|>assistant<|header|>\n\n« yes \n<|eot|>»"
        "<|start|>user<|header|>\n\nsure<|eot|><|start|>assistant<|header|>\n\n«no<|eot|>»"
    )


def test_a_template_that_rewrites_history_begins_a_new_sequence(tmp_path: Path) -> None:
    """The second is shown the first answer as the template shows it, and has no target in it."""
    folder = chat_directory(tmp_path, STRIPS_THOUGHTS)
    sayings = ["<think>hm</think>yes<|im_end|>", "<think>so</think>no<|im_end|>"]
    model = ScriptedModel(folder, sayings, stop="<|im_end|>")
    first, second = talk(folder, model, Answers([user("sure?")])).transcripts
    assert model.marked(first) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«<think>hm</think>yes<|im_end|>»"
    )
    assert model.marked(second) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n«<think>so</think>no<|im_end|>»"
    )
    shown = np.asarray(second.token_ids)[~np.asarray(second.sampled)]
    assert np.array_equal(model.requests[1].token_ids, shown)


def test_the_same_template_goes_on_where_it_rewrites_nothing(tmp_path: Path) -> None:
    """Without thoughts in its answer, and after a tool's."""
    folder = chat_directory(tmp_path, STRIPS_THOUGHTS)
    model = ScriptedModel(folder, ["yes<|im_end|>", "no<|im_end|>"], stop="<|im_end|>")
    assert len(talk(folder, model, Answers([user("sure?")])).transcripts) == 1
    sayings = ["<think>hm</think>yes<|im_end|>", "no<|im_end|>"]
    model = ScriptedModel(folder, sayings, stop="<|im_end|>")
    (transcript,) = talk(folder, model, Answers([Message("tool", "4")])).transcripts
    assert "«<think>hm</think>yes<|im_end|>»\n<|im_start|>tool\n4" in model.marked(transcript)


def test_a_tool_call_stays_as_it_was_written(tmp_path: Path) -> None:
    """The template would write its JSON with other spaces."""
    folder = chat_directory(tmp_path, CHATML)
    call = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    model = ScriptedModel(folder, [f"{call}<|im_end|>", "1<|im_end|>"], stop="<|im_end|>")
    episode = talk(folder, model, Answers([Message("tool", "1")], tools=True))
    (transcript,) = episode.transcripts
    assert model.marked(transcript).endswith(
        f"<|im_start|>assistant\n«{call}<|im_end|>»\n"
        "<|im_start|>user\n<tool_response>1</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«1<|im_end|>»"
    )
    assert episode.messages[1].tool_calls == (ToolCall("add", {"a": 1}, "call_0"),)
    assert episode.metrics == {"tool_calls": 1.0}


def test_calls_are_only_looked_for_where_there_are_tools(tmp_path: Path) -> None:
    folder = chat_directory(tmp_path, CHATML)
    call = '<tool_call>{"name":"add"}</tool_call>'
    model = ScriptedModel(folder, [f"{call}<|im_end|>"], stop="<|im_end|>")
    episode = talk(folder, model, Answers([]))
    assert episode.messages[1] == Message("assistant", call)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('hm <tool_call>{"name": "f", "arguments": {"x": [1]}}</tool_call>', "hm", [("f", [1])]),
        # A stop string cut off the end.
        ('<tool_call>\n{"name": "f", "arguments": {"x": 2}}\n', "", [("f", 2)]),
        (
            '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
            '<tool_call>{"name": "g", "arguments": {"x": 2}}</tool_call>',
            "",
            [("f", 1), ("g", 2)],
        ),
        ("no call", "no call", []),
    ],
)
def test_hermes_calls_are_read(text: str, content: str, calls: list[tuple[str, object]]) -> None:
    parsed = parse_message(text, "hermes")
    assert (parsed.message.content, parsed.num_malformed) == (content, 0)
    assert [(call.name, call.arguments["x"]) for call in parsed.message.tool_calls] == calls


@pytest.mark.parametrize(
    "body",
    ["{name: f}", "[1]", '{"arguments": {}}', '{"name": "f", "arguments": "x"}', "", "[" * 99999],
)
def test_malformed_calls_are_counted_and_left_to_the_environment(body: str) -> None:
    """Even beside a good one: half of what was meant is not what was meant."""
    good = '<tool_call>{"name": "f"}</tool_call>'
    text = f"{good}<tool_call>{body}</tool_call>"
    parsed = parse_message(text, "hermes")
    assert parsed.message == Message("assistant", text)
    assert parsed.num_malformed == 1


def test_llama_calls_are_read() -> None:
    call = parse_message('{"name": "f", "parameters": {"x": 1}}', "llama").message.tool_calls
    assert call == (ToolCall("f", {"x": 1}, "call_0"),)
    assert parse_message('{"name": f}', "llama").num_malformed == 1
    assert parse_message('The {"name": 1}', "llama").num_malformed == 0


def test_text_is_joined_as_it_is(tmp_path: Path) -> None:
    folder = chat_directory(tmp_path)
    model = ScriptedModel(folder, ["8", "4"])
    (transcript,) = talk(folder, model, Answers([user("<")])).transcripts
    assert model.marked(transcript) == "hi«8»<«4»"


def test_one_turn_is_the_transcript_of_its_completion(tiny_qwen3: Path) -> None:
    """Token by token what a rollout of single turns trained on before there were episodes."""
    model = ScriptedModel(tiny_qwen3, ["yes<eos>"])
    (transcript,) = talk(tiny_qwen3, model, Answers([])).transcripts
    prompt = load_tokenizer(tiny_qwen3).encode("hi")
    completion = asyncio.run(
        ScriptedModel(tiny_qwen3, ["yes<eos>"]).generate_one(model.requests[0])
    )
    assert list(model.requests[0].token_ids) == prompt
    assert transcript == Transcript.of_completion(completion)


def test_auto_takes_the_template_where_there_is_one(tmp_path: Path, tiny_qwen3: Path) -> None:
    with_template = chat_directory(tmp_path, CHATML)
    auto, chat = EnvironmentConfig(), EnvironmentConfig(renderer="chat")
    assert isinstance(make_renderer(auto, with_template), ChatRenderer)
    assert isinstance(make_renderer(auto, tiny_qwen3), TextRenderer)
    assert isinstance(
        make_renderer(EnvironmentConfig(renderer="text"), with_template), TextRenderer
    )
    with pytest.raises(ConfigError, match="has no chat template; add chat_template.jinja"):
        make_renderer(chat, tiny_qwen3)


def test_options_reach_the_template(tmp_path: Path) -> None:
    folder = chat_directory(tmp_path, "{{ greeting }}{{ messages[0].content }}")
    config = EnvironmentConfig(chat_template_options={"greeting": "<|eot|>"})
    model = ScriptedModel(folder, [])
    assert make_renderer(config, folder).render([user("x")], ()) == model.ids("<|eot|>x")


def test_an_answer_that_a_template_hides_begins_a_new_sequence(tmp_path: Path) -> None:
    """What comes after it cannot be told then."""
    only_users = "{% for m in messages if m.role == 'user' %}{{ m.content }}|{% endfor %}"
    folder = chat_directory(tmp_path, only_users)
    renderer = make_renderer(EnvironmentConfig(), folder)
    completion = Completion([1], [2], [0.0], [0], "yes", 1.0, "stop")
    history = [user("hi"), Message("assistant", "yes")]
    assert renderer.bridge(history, completion, [user("?")], ()) is None


def test_tokens_that_would_merge_with_what_follows_begin_a_new_sequence(tmp_path: Path) -> None:
    """The same text, but not the tokens that the model would have been shown."""
    said = Completion([1], [2], [0.0], [0], "yes", 1.0, "length")
    history = [user("hi"), Message("assistant", "yes")]
    bridges = []
    for end in ("a", "c"):
        template = "{% for m in messages %}{{ m.content + 'END' }}{% endfor %}".replace("END", end)
        folder = chat_directory(tmp_path / end, template)
        renderer = make_renderer(EnvironmentConfig(), folder)
        bridges.append(renderer.bridge(history, said, [user("b")], ()))
    assert bridges == [None, ScriptedModel(folder, []).ids("cbc")]
