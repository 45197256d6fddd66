"""What the columns of a row mean: a prompt from a mapping."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from forge_trainer.config import ColumnsConfig
from forge_trainer.errors import DataError
from forge_trainer.types import Message, Prompt, PromptKey

from .messages import parse_messages

ToPrompt = Callable[[Any], Prompt]
"""A prompt from one item of data. Raises DataError, which need not say where the item is."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Makes prompts of rows."""

    names: ColumnsConfig
    task: str
    """What the prompts say that they are of."""

    def __call__(self, row: Any) -> Prompt:
        """The row's prompt; a prompt stays as it is.

        Raises:
            DataError: it is no row, lacks a column, or holds what cannot be used.
        """
        if isinstance(row, Prompt):
            return row
        if not isinstance(row, Mapping):
            raise DataError(f"it must be a mapping of columns or a Prompt, got {_kind(row)}")
        names = self.names
        messages = () if names.messages is None else self._messages(row, names.messages)
        text = messages[-1].content if names.text is None else _prompt_text(row, names.text)
        used = {names.text, names.messages, names.answer, names.id}
        return Prompt(
            text=text,
            answer="" if names.answer is None else _written(row, "answer", names.answer),
            task=self.task,
            metadata={key: value for key, value in row.items() if key not in used},
            messages=messages,
            key=PromptKey(id="" if names.id is None else _written(row, "id", names.id)),
        )

    def _messages(self, row: Mapping[str, Any], column: str) -> tuple[Message, ...]:
        messages = parse_messages(_value(row, "messages", column))
        if messages[-1].role == "assistant":
            raise DataError(
                f"the conversation in {column!r} ends with the assistant's words, and the model "
                "goes on after another's; cut them off"
            )
        return messages


def _value(row: Mapping[str, Any], field: str, column: str) -> Any:
    """What is in the column, or where its dots lead."""
    found: Any = row
    for name in [column] if column in row else column.split("."):
        if not isinstance(found, Mapping) or name not in found:
            raise DataError(
                f"task.columns.{field}: there is no column {column!r}; there are "
                f"{', '.join(map(str, row)) or 'none'}"
            )
        found = found[name]
    if found is None:
        raise DataError(f"task.columns.{field}: {column!r} is null")
    return found


def _prompt_text(row: Mapping[str, Any], column: str) -> str:
    text = _value(row, "prompt", column)
    if isinstance(text, list):
        raise DataError(
            f"task.columns.prompt: {column!r} is a list; if it is a conversation, give "
            f"task.columns.messages: {column}"
        )
    if not isinstance(text, str) or not text:
        raise DataError(
            f"task.columns.prompt: {column!r} must be text, at least one character of it; got "
            f"{_kind(text)} {text!r}"
        )
    return text


def _written(row: Mapping[str, Any], field: str, column: str) -> str:
    """The column as text, in which a number is as Python writes it."""
    value = _value(row, field, column)
    if isinstance(value, str):
        return value
    if isinstance(value, numbers.Real | Decimal) and math.isfinite(value):
        return str(value)
    raise DataError(
        f"task.columns.{field}: {column!r} must be text or a number, got {_kind(value)} {value!r}; "
        "other columns reach a reward as prompt.metadata"
    )


def _kind(value: Any) -> str:
    return type(value).__name__
