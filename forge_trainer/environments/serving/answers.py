"""What an agent is answered, in the words of OpenAI's chat protocol."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forge_trainer.types import Completion, Message, ToolCall
from forge_trainer.types.arrays import as_array

from .asked import Asked, RefusedError

MODEL = "policy"
"""What the model is called; requests may call it anything."""
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answered:
    """A completion, as what it says and as what was sampled."""

    id: str
    message: Message
    completion: Completion

    @property
    def finish_reason(self) -> str:
        if self.message.tool_calls:
            return "tool_calls"
        return "stop" if self.completion.stopped else "length"


def whole_answer(answered: Answered, asked: Asked) -> Json:
    """The answer to a request that wants it at once."""
    choice = {
        "index": 0,
        "message": _message(answered.message),
        "logprobs": _logprobs(answered) if asked.logprobs else None,
        "finish_reason": answered.finish_reason,
    }
    frame = _frame(answered, "chat.completion")
    return {**frame, "choices": [choice], "usage": _usage(answered.completion)}


def streamed_answer(answered: Answered, asked: Asked) -> Iterator[str]:
    """The lines of a stream of events: all that was said, why it ended, and what it used."""
    frame = _frame(answered, "chat.completion.chunk")
    said = _message(answered.message)
    calls = [{"index": i, **call} for i, call in enumerate(said.get("tool_calls", ()))]
    delta = {**said, "tool_calls": calls} if calls else said
    logprobs = _logprobs(answered) if asked.logprobs else None
    choices: list[Json] = [
        {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None},
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": answered.finish_reason},
    ]
    for choice in choices:
        yield _event({**frame, "choices": [choice]})
    if asked.include_usage:
        yield _event({**frame, "choices": [], "usage": _usage(answered.completion)})
    yield "data: [DONE]\n\n"


def error_answer(refused: RefusedError) -> Json:
    """Why there is no answer."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    error = {"message": str(refused), "type": kind, "param": refused.param, "code": refused.code}
    return {"error": error}


def models_answer() -> Json:
    """The one model that there is."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "forge_trainer"}
    return {"object": "list", "data": [model]}


def _frame(answered: Answered, kind: str) -> Json:
    return {
        "id": f"chatcmpl-{answered.id}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
    }


def _message(message: Message) -> dict[str, Any]:
    if not message.tool_calls:
        return {"role": "assistant", "content": message.content, "refusal": None}
    return {
        "role": "assistant",
        "content": message.content or None,
        "refusal": None,
        "tool_calls": [_call(call) for call in message.tool_calls],
    }


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _logprobs(answered: Answered) -> Json:
    """Of the tokens by their numbers, since one alone need not be a text."""
    sampled, logprobs = map(as_array, (answered.completion.token_ids, answered.completion.logprobs))
    content: list[Json] = [
        {
            "token": f"token_id:{token}",
            # No JSON is infinite; OpenAI says it like this.
            "logprob": logprob if math.isfinite(logprob) else -9999.0,
            "bytes": None,
            "top_logprobs": [],
        }
        for token, logprob in zip(sampled.tolist(), logprobs.tolist(), strict=True)
    ]
    return {"content": content, "refusal": None}


def _usage(completion: Completion) -> Json:
    num_prompt, num_sampled = len(completion.prompt_token_ids), len(completion.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def _event(value: Json) -> str:
    return f"data: {json.dumps(value)}\n\n"
