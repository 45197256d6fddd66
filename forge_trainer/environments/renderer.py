"""Between messages and tokens: render a conversation, parse an answer, bridge to the next turn.

A bridge appends to the tokens that the model has seen and sampled, and never makes them anew: what
it sampled need not be what a tokenizer would make of the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from forge_trainer.config import EnvironmentConfig
from forge_trainer.hf import ChatTemplate, TextEncoder, has_chat_template
from forge_trainer.types import Completion, Message
from forge_trainer.types.arrays import as_array

from .tool_calls import Parsed, ToolFormat, parse_message, template_message, tool_format

Tools = Sequence[Mapping[str, Any]]
PLACEHOLDER = "what-the-assistant-said-7f3a"
"""Stands for an answer; no template changes it, and nobody else writes it."""


class Renderer(Protocol):
    """How one model is talked to."""

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The conversation's token ids, up to where the assistant is to speak."""
        ...

    def parse(self, completion: Completion, tools: Tools) -> Parsed:
        """What was said, with tool calls if there are tools to call."""
        ...

    def bridge(
        self,
        history: Sequence[Message],
        completion: Completion,
        messages: Sequence[Message],
        tools: Tools,
    ) -> list[int] | None:
        """What comes between the tokens of `completion` and where the assistant is to speak again.

        `history` ends with what `completion` said; `messages` answer it. None: with these, the
        conversation's beginning is shown in another way; render it anew.
        """
        ...


def make_renderer(config: EnvironmentConfig, model_dir: Path) -> Renderer:
    """The renderer that the config asks for.

    Raises:
        ConfigError: it is `chat`, and the directory has no chat template; or there is no tokenizer.
    """
    encoder = TextEncoder(model_dir)
    wanted = config.renderer
    if wanted == "text" or (wanted == "auto" and not has_chat_template(model_dir)):
        return TextRenderer(encoder)
    return ChatRenderer(encoder, ChatTemplate(model_dir, config.chat_template_options))


class TextRenderer:
    """Contents joined as they are, for models without a chat template; tools are not shown."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        return self._encoder.encode(_joined(messages), first=True)

    def parse(self, completion: Completion, tools: Tools) -> Parsed:
        return _parsed(completion, "hermes" if tools else None)

    def bridge(
        self,
        history: Sequence[Message],
        completion: Completion,
        messages: Sequence[Message],
        tools: Tools,
    ) -> list[int] | None:
        return self._encoder.encode(_joined(messages), first=False)


class ChatRenderer:
    """A chat template's rendering."""

    def __init__(self, encoder: TextEncoder, template: ChatTemplate) -> None:
        self._encoder = encoder
        self._template = template

    def render(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        return self._encode(self._text(messages, tools, to_go_on=True))

    def parse(self, completion: Completion, tools: Tools) -> Parsed:
        return _parsed(completion, tool_format(self._template.source(tools)) if tools else None)

    def bridge(
        self,
        history: Sequence[Message],
        completion: Completion,
        messages: Sequence[Message],
        tools: Tools,
    ) -> list[int] | None:
        """The rule: with `messages`, the template must begin as it ended without them.

        It is asked of the text, and of the tokens from the end of the answer on; templates end an
        answer with a special token, before which the same text has the same tokens.
        """
        before = self._text(history, tools, to_go_on=False)
        after = self._text([*history, *messages], tools, to_go_on=True)
        end = self._end_of_turn(history, tools)
        if end is None or not before.endswith(end) or not after.startswith(before):
            return None
        end_ids = self._encode(end)
        ids = self._encode(end + after.removeprefix(before))
        if ids[: len(end_ids)] != end_ids:
            return None
        return ids[1:] if end_ids and _ended_with(completion, end_ids[0]) else ids

    def _end_of_turn(self, history: Sequence[Message], tools: Tools) -> str | None:
        """What the template puts after an answer; None if that cannot be told."""
        answer = Message("assistant", PLACEHOLDER)
        text = self._text([*history[:-1], answer], tools, to_go_on=False)
        return text.rpartition(PLACEHOLDER)[2] if text.count(PLACEHOLDER) == 1 else None

    def _text(self, messages: Sequence[Message], tools: Tools, *, to_go_on: bool) -> str:
        shown = [template_message(message) for message in messages]
        return self._template.text(shown, tools, to_go_on=to_go_on)

    def _encode(self, text: str) -> list[int]:
        return self._encoder.encode(text, first=False)


def _joined(messages: Sequence[Message]) -> str:
    return "".join(message.content for message in messages)


def _ended_with(completion: Completion, token: int) -> bool:
    """Whether the model itself ended its turn with this token."""
    sampled = as_array(completion.token_ids)
    return completion.stopped and len(sampled) > 0 and int(sampled[-1]) == token


def _parsed(completion: Completion, form: ToolFormat | None) -> Parsed:
    if form is None:
        return Parsed(Message("assistant", completion.text))
    return parse_message(completion.text, form)
