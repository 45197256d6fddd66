"""Tasks: a source of prompts and the reward that belongs to them."""

from __future__ import annotations

from dataclasses import dataclass

from forge_trainer.config import FILE_KINDS, TaskConfig
from forge_trainer.errors import ConfigError, DataError
from forge_trainer.functional.rewards import REWARDS, resolve_reward, starts_with_answer
from forge_trainer.types import Prompt, RewardFn

from .columns import Columns
from .functions import own_prompts
from .indexed import IndexedPrompts
from .procedural import ReasoningGymRows, larger_digit
from .rows import Rows
from .source import PromptData, PromptSource
from .streams import StreamedPrompts

REASONING_GYM = "reasoning_gym/"
CHECKED_ROWS = 20_000
"""Rows that are read before anything starts; a malformed one beyond ends the run when reached."""


@dataclass(frozen=True, slots=True)
class Task:
    prompts: PromptSource
    reward: RewardFn | None
    """None: it brings none, and something else judges."""


def make_task(config: TaskConfig, *, seed: int, needs_reward: bool = True) -> Task:
    """The task that the config names.

    Without `needs_reward`, as where an environment judges, it may have none.

    Raises:
        ConfigError: unknown task, data set, file, column, option or reward, or a malformed row
            among the first.
    """
    data, reward = _open(config, seed)
    if config.reward is not None:
        reward = resolve_reward(config.reward)
    if reward is None and needs_reward:
        raise ConfigError(
            f"task.reward: {config.name} brings none of its own; name one of {sorted(REWARDS)} or "
            "'package.module:function'"
        )
    source = PromptSource(data, epochs=config.epochs, on_long_prompt=config.on_long_prompt)
    return Task(source, reward)


def _open(config: TaskConfig, seed: int) -> tuple[PromptData, RewardFn | None]:
    """Where the task's prompts are, and its own reward."""
    if config.name in FILE_KINDS:
        to_prompt = Columns(config.columns, config.path or "")
        data = IndexedPrompts(_open_file(config), to_prompt, seed=seed, shuffle=config.shuffle)
        _check_rows(data)
        return data, None
    if config.name.startswith(REASONING_GYM):
        name = config.name.removeprefix(REASONING_GYM)
        rows = ReasoningGymRows(name, config.options, seed=seed)
        return IndexedPrompts(rows, _as_it_is, seed=seed, shuffle=config.shuffle), rows.reward
    if ":" in config.name:
        return own_prompts(config, seed=seed)
    if config.name == "larger_digit":
        _refuse_options(config)
        stream = StreamedPrompts(larger_digit, _as_it_is, name=config.name, seed=seed)
        return stream, starts_with_answer
    raise ConfigError(
        f"task.name: {config.name!r} is unknown; use 'larger_digit', '{REASONING_GYM}<dataset>', "
        f"{', '.join(map(repr, FILE_KINDS))} or 'package.module:name'"
    )


def _open_file(config: TaskConfig) -> Rows:
    assert config.path is not None, "TaskConfig gives every file kind a path"
    if config.name == "huggingface":
        from .rows.huggingface import HuggingFaceRows

        return HuggingFaceRows(config.path, config.options)
    from .rows.files import find_files

    _refuse_options(config)
    files = find_files(config.path)
    if config.name == "jsonl":
        from .rows.jsonl import JsonLines

        return JsonLines(files)
    from .rows.parquet import ParquetRows

    return ParquetRows(files)


def _check_rows(data: IndexedPrompts) -> None:
    try:
        for index in range(min(len(data), CHECKED_ROWS)):
            data.prompt(index)
    except DataError as error:
        raise ConfigError(f"task.path: {error}") from error


def _refuse_options(config: TaskConfig) -> None:
    if config.options:
        raise ConfigError(f"task.options: {config.name} takes none, got {config.options}")


def _as_it_is(prompt: Prompt) -> Prompt:
    return prompt
