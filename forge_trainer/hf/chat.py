"""A directory's chat template: messages in, text out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge_trainer.errors import ConfigError

from .tokenizer import load_tokenizer

ChatMessage = Mapping[str, Any]
"""As chat templates take it: role, content, tool_calls, tool_call_id."""


def has_chat_template(path: Path) -> bool:
    """Whether a directory's tokenizer has one; transformers is not asked, it takes seconds."""
    if (path / "chat_template.jinja").is_file() or (path / "chat_template.json").is_file():
        return True
    try:
        values = json.loads((path / "tokenizer_config.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(values.get("chat_template"))


class ChatTemplate:
    """The template of a directory, with options of its own such as enable_thinking.

    Raises:
        ConfigError: the directory has none.
    """

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self._tokenizer: Any = load_tokenizer(path)
        self._options = dict(options)
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"environment.renderer: chat, but the tokenizer of {path} has no chat template; "
                "add chat_template.jinja, or use text"
            )

    def source(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The template itself: the one that is used where there are `tools`."""
        return str(self._tokenizer.get_chat_template(tools=list(tools) or None))

    def text(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        *,
        to_go_on: bool,
    ) -> str:
        """The conversation; if `to_go_on`, up to where the assistant is to speak.

        Raises:
            jinja2.TemplateError: the template does not take these messages.
        """
        rendered: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            add_generation_prompt=to_go_on,
            tokenize=False,
            **self._options,
        )
        return rendered
