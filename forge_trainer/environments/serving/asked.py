"""What an agent asks for, in the words of OpenAI's chat protocol; what of that is refused, and why.

No tokens here: a request's body in, messages and limits out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from forge_trainer.types import Message, SamplingParams, ToolCall

ANOTHER_DISTRIBUTION = (
    "it changes the distribution that is sampled from, so that log-probs would not be of the model "
    "that is trained"
)
NOT_HELD = "the model is trained on what it says by itself, and is not held to a form"
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "top_p": ((1,), ANOTHER_DISTRIBUTION),
    "top_k": ((0, -1), ANOTHER_DISTRIBUTION),
    "min_p": ((0,), ANOTHER_DISTRIBUTION),
    "logit_bias": (({},), ANOTHER_DISTRIBUTION),
    "presence_penalty": ((0,), ANOTHER_DISTRIBUTION),
    "frequency_penalty": ((0,), ANOTHER_DISTRIBUTION),
    "repetition_penalty": ((1,), ANOTHER_DISTRIBUTION),
    "n": ((1,), "a request has one completion; ask again for another"),
    "seed": ((), "seeds follow from the run's, so that the episodes of a group differ"),
    "top_logprobs": ((0,), "log-probs are kept of sampled tokens only"),
    "tool_choice": (("auto", "none"), NOT_HELD),
    "parallel_tool_calls": ((True,), NOT_HELD),
    "response_format": (({"type": "text"},), NOT_HELD),
}
"""With which values these may be given, and why with no others."""
IGNORED = (
    "model",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""These have no bearing on what is sampled."""


class RefusedError(Exception):
    """A request that is answered by an error, in OpenAI's form."""

    def __init__(
        self, message: str, *, code: str, status: int = 400, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        """Of HTTP. From 500 on, and at 408, 409 and 429, OpenAI's client asks again by itself."""
        self.param = param


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion that is wanted."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_completion_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """At the end of a stream."""
    logprobs: bool = False


def read_request(body: bytes, sampling: SamplingParams) -> Asked:
    """What the body of a request asks for, in a run that samples by `sampling`.

    Raises:
        RefusedError: it is malformed, or asks for what cannot be trained.
    """
    try:
        given = json.loads(body)
    except ValueError as error:
        raise RefusedError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(given, dict):
        raise RefusedError("the body is not a JSON object", code="invalid_json")
    given = {key: value for key, value in given.items() if value is not None}
    _require_temperature(given.pop("temperature", sampling.temperature), sampling)
    if given.get("tool_choice") == "none":
        given.pop("tools", None)
    return _read(_with_a_bearing(given))


def _require_temperature(temperature: Any, sampling: SamplingParams) -> None:
    wanted = (sampling.temperature, 0) if sampling.greedy else (sampling.temperature,)
    if temperature not in wanted:
        why = f"this run samples at {sampling.temperature:g}, for all of its requests; leave it out"
        raise _unsupported("temperature", temperature, why)


def _with_a_bearing(given: Mapping[str, Any]) -> dict[str, Any]:
    """What says something of the completion that is wanted."""
    left = {key: value for key, value in given.items() if key not in IGNORED}
    for key, (values, why) in ONLY.items():
        if key in left and (value := left.pop(key)) not in values:
            raise _unsupported(key, value, why)
    for key, value in left.items():
        if key not in _Body.model_fields:
            raise _unsupported(key, value, "it is not known here; leave it out")
    return left


def _unsupported(key: str, value: Any, why: str) -> RefusedError:
    what = f"{key} = {json.dumps(value)[:80]} cannot be had: {why}"
    return RefusedError(what, code="unsupported_value", param=key)


def _read(given: Mapping[str, Any]) -> Asked:
    try:
        return _Body.model_validate(given).asked()
    except ValidationError as errors:
        error = errors.errors()[0]
        where = ".".join(map(str, error["loc"]))
        what = error["msg"].removeprefix("Value error, ")
        what = f"{where}: {what}" if where else what
        raise RefusedError(what, code="invalid_value", param=where or None) from None


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _Function(BaseModel):
    name: str
    arguments: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def arguments_come_as_json(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(text := given.get("arguments"), str):
            return given | {"arguments": json.loads(text or "{}")}
        return given


class _Call(BaseModel):
    id: str
    type: Literal["function"]
    function: _Function


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: list[_Text] = []
    tool_calls: list[_Call] = []
    tool_call_id: str | None = None
    name: str | None = None
    """Chat templates have no place for it."""

    @model_validator(mode="before")
    @classmethod
    def there_are_several_forms_of_nothing(cls, given: Any) -> Any:
        """OpenAI's client gives an answer back with a refusal, audio and others that are null."""
        if not isinstance(given, dict):
            return given
        said = {key: value for key, value in given.items() if value not in (None, [])}
        if isinstance(text := said.get("content"), str):
            said["content"] = [{"type": "text", "text": text}]
        return said

    def message(self) -> Message:
        calls = (ToolCall(c.function.name, c.function.arguments, c.id) for c in self.tool_calls)
        return Message(
            role="system" if self.role == "developer" else self.role,
            content="".join(part.text for part in self.content),
            tool_calls=tuple(calls),
            tool_call_id=self.tool_call_id,
        )


class _Tool(BaseModel):
    """Chat templates get all that is in it."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: dict[str, Any]


class _StreamOptions(BaseModel):
    include_usage: bool = False


class _Body(BaseModel):
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: list[_Tool] = []
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    logprobs: bool = False

    @model_validator(mode="after")
    def the_assistant_is_to_speak(self) -> _Body:
        if self.messages[-1].role == "assistant":
            raise ValueError("the last message is the assistant's, and nobody goes on from there")
        return self

    def asked(self) -> Asked:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return Asked(
            messages=tuple(message.message() for message in self.messages),
            tools=tuple(tool.model_dump() for tool in self.tools),
            max_completion_tokens=self.max_completion_tokens or self.max_tokens,
            stop=tuple(filter(None, stop)),
            stream=self.stream,
            include_usage=self.stream_options.include_usage,
            logprobs=self.logprobs,
        )
