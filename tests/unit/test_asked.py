"""What an agent may ask for, what not, and what it is told then."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from forge_trainer.environments.serving.answers import Answered, streamed_answer, whole_answer
from forge_trainer.environments.serving.asked import Asked, RefusedError, read_request
from forge_trainer.types import Completion, Message, SamplingParams, StopReason, ToolCall

SAMPLING = SamplingParams(max_completion_tokens=8, temperature=0.7)
HI = {"role": "user", "content": "hi"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def read(sampling: SamplingParams = SAMPLING, **body: Any) -> Asked:
    return read_request(json.dumps({"messages": [HI]} | body).encode(), sampling)


def test_what_says_nothing_of_the_completion_is_taken_as_it_is() -> None:
    plain = Asked((Message("user", "hi"),))
    assert read() == plain
    assert read(model="gpt-5", user="me", metadata={"a": 1}, store=True, temperature=0.7) == plain
    assert read(top_p=1.0, n=1, logit_bias={}, presence_penalty=0, top_k=-1) == plain
    assert read(response_format={"type": "text"}, tool_choice="auto", min_p=0.0) == plain
    assert read(top_p=None, seed=None, tools=None, stop=None, stream_options=None) == plain


def test_limits_and_forms_are_read() -> None:
    assert read(max_tokens=3).max_completion_tokens == 3
    assert read(max_tokens=3, max_completion_tokens=2).max_completion_tokens == 2
    assert read(stop="a").stop == ("a",)
    assert read(stop=["a", "b"]).stop == ("a", "b")
    streamed = read(stream=True, stream_options={"include_usage": True}, logprobs=True)
    assert (streamed.stream, streamed.include_usage, streamed.logprobs) == (True, True, True)


def test_messages_become_those_of_environments() -> None:
    call = {
        "id": "call00000",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }
    said = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "annotations": [],
        "function_call": None,
        "tool_calls": [call],
    }
    asked = read(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": text} for text in "12"]},
            said,
            {"role": "tool", "tool_call_id": "call00000", "content": "3", "name": "add"},
        ],
        tools=[ADD],
    )
    assert asked.messages == (
        Message("system", "be brief"),
        Message("user", "12"),
        Message("assistant", "", tool_calls=(ToolCall("add", {"a": 1}, "call00000"),)),
        Message("tool", "3", tool_call_id="call00000"),
    )
    assert asked.tools == (ADD,)


def test_without_a_choice_of_tools_there_are_none() -> None:
    assert read(tools=[ADD], tool_choice="none").tools == ()


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"top_p": 0.9}, "top_p", "top_p = 0.9 cannot be had: it changes the distribution"),
        ({"top_k": 50}, "top_k", "it changes the distribution"),
        ({"min_p": 0.1}, "min_p", "it changes the distribution"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "it changes the distribution"),
        ({"frequency_penalty": 0.1}, "frequency_penalty", "it changes the distribution"),
        ({"n": 2}, "n", "a request has one completion"),
        ({"seed": 0}, "seed", "seeds follow from the run's"),
        ({"temperature": 1.0}, "temperature", "temperature = 1.0 .* this run samples at 0.7"),
        ({"temperature": 0}, "temperature", "this run samples at 0.7"),
        ({"tool_choice": "required"}, "tool_choice", "is not held to a form"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "is not held to a form"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not held to a form"),
        ({"top_logprobs": 5}, "top_logprobs", "of sampled tokens only"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "not known here; leave it out"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "'text'"),
        ({"messages": [{"role": "function", "content": ""}]}, "messages.0.role", "Input should"),
        ({"messages": [HI | {"audio": {"id": "1"}}]}, "messages.0.audio", "not permitted"),
        ({"messages": [HI, {"role": "assistant", "content": "I"}]}, None, "nobody goes on"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(
    body: dict[str, Any], param: str | None, message: str
) -> None:
    with pytest.raises(RefusedError, match=message) as refused:
        read(**body)
    assert refused.value.status == 400
    if param is not None:
        assert refused.value.param == param


@pytest.mark.parametrize("arguments", ["{", "[1]", 5])
def test_arguments_that_are_no_object_are_refused(arguments: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(RefusedError, match=r"messages\.0\..*function"):
        read(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}, HI])


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RefusedError) as refused:
        read_request(body, SAMPLING)
    assert refused.value.code == "invalid_json"


def test_a_greedy_run_may_be_asked_for_what_it_does() -> None:
    greedy = SamplingParams(max_completion_tokens=8, temperature=0.7, greedy=True)
    assert read(greedy, temperature=0) == read(greedy, temperature=0.7) == read(greedy)
    with pytest.raises(RefusedError, match="leave it out"):
        read(greedy, temperature=1)


def answered(message: Message, stop_reason: StopReason = "stop") -> Answered:
    completion = Completion([1, 2, 3], [7, 8], [-0.5, -math.inf], [0, 0], "", 0.7, stop_reason)
    return Answered("1", message, completion)


def test_an_answer_has_the_log_probs_that_it_was_sampled_with() -> None:
    asked = Asked((), logprobs=True)
    whole = whole_answer(answered(Message("assistant", "yes")), asked)
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == "yes"
    assert choice["finish_reason"] == "stop"
    tokens = [(one["token"], one["logprob"]) for one in choice["logprobs"]["content"]]
    assert tokens == [("token_id:7", -0.5), ("token_id:8", -9999.0)]
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    without = whole_answer(answered(Message("assistant", "yes")), Asked(()))
    assert without["choices"][0]["logprobs"] is None


def test_an_answer_says_why_it_ended() -> None:
    call = Message("assistant", "", tool_calls=(ToolCall("f", {"x": [1]}, "call00001"),))
    (choice,) = whole_answer(answered(call), Asked(()))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "f", "arguments": '{"x": [1]}'},
        }
    ]
    cut = whole_answer(answered(Message("assistant", "y"), "length"), Asked(()))
    assert cut["choices"][0]["finish_reason"] == "length"


def test_a_stream_says_the_same_in_events() -> None:
    call = Message("assistant", "so:", tool_calls=(ToolCall("f", {}, "call00000"),))
    lines = list(streamed_answer(answered(call), Asked((), include_usage=True)))
    assert lines[-1] == "data: [DONE]\n\n"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    said, end, usage = events
    assert said["choices"][0]["delta"]["content"] == "so:"
    assert said["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert said["choices"][0]["finish_reason"] is None
    assert end["choices"][0]["finish_reason"] == "tool_calls"
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 5)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len(list(streamed_answer(answered(call), Asked(())))) == 3
