"""What an environment and a model say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

MessageRole = Literal["system", "user", "assistant", "tool"]
StopReason = Literal["stop", "length", "cancelled"]
"""Why a completion ended: a stop token or string; the limit on its tokens; its caller gave up."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: MessageRole
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Of an assistant."""
    tool_call_id: str | None = None
    """Of a tool: the call that this is the answer to."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How an environment begins."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of functions, as chat templates take them."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment answers to a message of the model's."""

    messages: Sequence[Message] = ()
    """For the model to go on from; never an assistant's. Nobody reads them when it is done."""
    done: bool = False
    rewards: Mapping[str, float] = field(default_factory=dict)
    """By name; those of all turns are summed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """By name; the last turn's value counts."""
