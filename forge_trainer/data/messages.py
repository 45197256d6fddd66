"""Conversations as OpenAI's chat API writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from forge_trainer.errors import DataError
from forge_trainer.types import Message, MessageRole, ToolCall

ROLES = get_args(MessageRole)


def parse_messages(values: Any) -> tuple[Message, ...]:
    """The conversation that a list of mappings holds; what is null counts as absent.

    `[{"role": "user", "content": "hi"}]` -> `(Message("user", "hi"),)`. Contents of several parts
    are joined if all are text.

    Raises:
        DataError: it is none.
    """
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        kind = type(values).__name__
        raise DataError(f"a conversation is a list of messages, at least one; got {kind} {values}")
    return tuple(_parse_message(number, value) for number, value in enumerate(values))


def _parse_message(number: int, value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f"message {number} must be a mapping, got {type(value).__name__}")
    role: Any = value.get("role")
    if role not in ROLES:
        raise DataError(f"message {number} has the role {role!r}; known are {', '.join(ROLES)}")
    calls = tuple(_parse_call(number, call) for call in value.get("tool_calls") or ())
    content = value.get("content")
    if content is None and not calls:
        raise DataError(f"message {number}, the {role}'s, has no content")
    return Message(role, _text(number, content), calls, value.get("tool_call_id"))


def _text(number: int, content: Any) -> str:
    """Of a content that is text, a list of parts, or missing."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        kind = type(content).__name__
        raise DataError(f"message {number}: its content must be text or parts, got {kind}")
    parts = []
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise DataError(f"message {number} has a part that is not text: {str(part)[:60]}")
        parts.append(part["text"])
    return "".join(parts)


def _parse_call(number: int, call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"message {number}: a tool call has no function with a name: {call}")
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError as error:
        raise DataError(f"message {number}: arguments of a call are not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise DataError(f"message {number}: arguments of a call must be a mapping: {arguments}")
    return ToolCall(function["name"], arguments, call.get("id") or "")
