"""Prompts that a function or class of the user's makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from forge_trainer.config import TaskConfig
from forge_trainer.errors import ConfigError, DataError
from forge_trainer.functional.named import import_callable
from forge_trainer.types import Prompt, RewardFn

from .columns import Columns
from .indexed import IndexedPrompts
from .rows import Layout, one_by_one
from .streams import StreamedPrompts


def own_prompts(
    config: TaskConfig, *, seed: int
) -> tuple[IndexedPrompts | StreamedPrompts, RewardFn | None]:
    """What `task.name: package.module:name` makes, called with the seed and the options.

    Something that can be asked for its length and for any item is shuffled as rows are; anything
    else that can be iterated over is taken in its own order. Its items are Prompts, or mappings
    whose columns the config names. A method `reward(completion, prompt)` is the task's own reward.

    Raises:
        ConfigError: it cannot be imported or called, or makes something else.
    """
    make = import_callable("task.name", config.name)
    first = _call(make, config, seed)
    to_prompt, reward = Columns(config.columns, config.name), getattr(first, "reward", None)
    if hasattr(first, "__getitem__") and hasattr(first, "__len__"):
        rows = OwnRows(first, config.name)
        return IndexedPrompts(rows, to_prompt, seed=seed, shuffle=config.shuffle), reward

    return StreamedPrompts(
        partial(_call, make, config), to_prompt, name=config.name, seed=seed
    ), reward


def _call(make: Callable[..., Any], config: TaskConfig, seed: int) -> Any:
    try:
        made = make(seed=seed, **config.options)
    except Exception as error:
        raise ConfigError(
            f"task: {config.name} cannot be called with seed={seed} and {config.options}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(made, Prompt | Mapping | str) or not _can_be_read(made):
        raise ConfigError(
            f"task: {config.name} made {type(made).__name__}; it must yield prompts, or return "
            "something that can be iterated over"
        )
    return made


def _can_be_read(made: Any) -> bool:
    return hasattr(made, "__iter__") or (hasattr(made, "__getitem__") and hasattr(made, "__len__"))


class OwnRows:
    """Items of an object of the user's."""

    def __init__(self, items: Any, name: str) -> None:
        """Raises ConfigError if there is none."""
        self._items = items
        self._name = name
        if not len(self):
            raise ConfigError(f"task: {name} made {type(items).__name__} without an item")

    @property
    def layout(self) -> Layout:
        return one_by_one(len(self))

    def __len__(self) -> int:
        return len(self._items)

    def row(self, index: int) -> Any:
        try:
            return self._items[index]
        except Exception as error:
            raise DataError(f"it cannot be made: {type(error).__name__}: {error}") from error

    def where(self, index: int) -> str:
        return f"{self._name}, item {index}"
