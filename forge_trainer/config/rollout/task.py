"""What the model is asked, and how its answers are judged."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from ..section import Folder, Section

FileKind = Literal["jsonl", "parquet", "huggingface"]
FILE_KINDS: tuple[FileKind, ...] = ("jsonl", "parquet", "huggingface")
OnLongPrompt = Literal["drop", "truncate_left", "error"]


class ColumnsConfig(Section):
    """Which column of the data is what. A dot leads into a column: `reward_model.ground_truth`.

    All other columns go into the prompt's metadata under their own names.
    """

    prompt: str | None = None
    """The text for the model; None is `prompt`, or nothing where `messages` is given."""
    messages: str | None = None
    """A conversation to go on from, as OpenAI's chat API has it: a list of role and content."""
    answer: str | None = "answer"
    """What a reward compares with; null where the data has none."""
    id: str | None = None
    """A name of the row that stays its own; None takes its number."""

    @property
    def text(self) -> str | None:
        """The column of `prompt`."""
        return "prompt" if self.prompt is None and self.messages is None else self.prompt


class TaskConfig(Section):
    """Where prompts come from and how completions are judged."""

    name: str = "larger_digit"
    """`larger_digit`, `reasoning_gym/<dataset>` such as `reasoning_gym/chain_sum`, `jsonl`,
    `parquet`, `huggingface`, or a function or class of your own as "package.module:name"."""
    path: Folder | None = None
    """Of jsonl and parquet: a file, or a pattern such as data/train-*.parquet. Of huggingface: a
    directory, or a hub id."""
    columns: ColumnsConfig = ColumnsConfig()
    """Of files, and of dictionaries that a function of your own yields."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task: min_terms for reasoning_gym/chain_sum, split for huggingface."""
    shuffle: bool = True
    """Rows in an order that follows from the seed, a new one every epoch. What has no rows, such
    as a generator function, comes as it is."""
    epochs: PositiveInt | None = None
    """Times that all prompts are asked; None starts again without end."""
    on_long_prompt: OnLongPrompt = "drop"
    """What becomes of a prompt of more than generator.max_prompt_tokens: the next one is taken in
    its place, its beginning is cut off, or the run ends. The first two are counted in metrics."""
    reward: str | None = None
    """A reward's name or "package.module:function"; None takes the task's own."""

    @model_validator(mode="after")
    def files_have_a_path(self) -> Self:
        if (self.name in FILE_KINDS) != (self.path is not None):
            wanted = "is missing" if self.path is None else f"is given, {self.path}"
            raise ValueError(
                f"path {wanted}, and name is {self.name!r}; {', '.join(FILE_KINDS)} need a path, "
                "and nothing else has one"
            )
        return self

    @model_validator(mode="after")
    def columns_are_of_data_that_has_them(self) -> Self:
        if self.columns != ColumnsConfig() and self.name not in FILE_KINDS and ":" not in self.name:
            raise ValueError(f"columns are given, and {self.name!r} has none; leave them out")
        return self
