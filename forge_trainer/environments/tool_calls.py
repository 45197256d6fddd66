"""Tool calls in what a model says, in the forms that models are trained to write.

hermes  <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number of them, after
        what is said to the user (Hermes, Qwen 2.5 and 3, SmolLM)
llama   {"name": "add", "parameters": {"a": 1}} and nothing else (Llama 3.1 and later)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge_trainer.types import Message, ToolCall

ToolFormat = Literal["hermes", "llama"]
# A stop string may have cut off the end of the last one.
HERMES_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
LLAMA_CALL = re.compile(r"\s*(?:<\|python_tag\|>)?\s*(\{\s*\"name\".*\})\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Parsed:
    """What the model said, as a message."""

    message: Message
    num_malformed: int = 0
    """Of its tool calls, those that could not be read: the message then has no calls at all, and
    its content is all that was said, for the environment to answer."""


def tool_format(template: str) -> ToolFormat:
    """In which form a chat template shows tool calls."""
    return "llama" if '"parameters"' in template and "<tool_call>" not in template else "hermes"


def parse_message(text: str, form: ToolFormat) -> Parsed:
    """The assistant's message that `text` is."""
    bodies = HERMES_CALL.findall(text) if form == "hermes" else _llama_bodies(text)
    calls = [_read_call(body, f"call_{number}") for number, body in enumerate(bodies)]
    num_malformed = sum(call is None for call in calls)
    if num_malformed or not calls:
        return Parsed(Message("assistant", text), num_malformed)
    content = HERMES_CALL.sub("", text).strip() if form == "hermes" else ""
    found = tuple(call for call in calls if call is not None)
    return Parsed(Message("assistant", content, tool_calls=found))


def template_message(message: Message) -> Mapping[str, Any]:
    """A message as chat templates take it."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shown["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _template_call(call: ToolCall) -> Mapping[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _llama_bodies(text: str) -> Sequence[str]:
    found = LLAMA_CALL.fullmatch(text)
    return [found[1]] if found else []


def _read_call(body: str, call_id: str) -> ToolCall | None:
    """None: not a call."""
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return ToolCall(call["name"], arguments, call_id) if isinstance(arguments, dict) else None
