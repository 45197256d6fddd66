"""Calling a reward on texts: a number for each, or what went wrong. Also what a process of the pool
runs, so it imports as little as it can."""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import cloudpickle

from forge_trainer.functional.rewards import Reward
from forge_trainer.types import Prompt

Answer = float | str
"""A finite number; or what the reward did instead, such as "raised ValueError: no digits"."""

_rewards: dict[str, Reward | str] = {}
"""Of this process of the pool, by name; a text is why one cannot be had here."""


def call_reward(reward: Reward, texts: Sequence[str], prompt: Prompt) -> list[Answer]:
    """The answers of a reward that is not async, one per text; it never raises."""
    if reward.takes_group:
        try:
            return read_group(reward.function(list(texts), prompt), len(texts))
        except Exception as error:
            return [raised(error)] * len(texts)
    return [_call(reward, text, prompt) for text in texts]


def read_group(values: Any, num_texts: int) -> list[Answer]:
    """What a reward answered to a whole group."""
    try:
        answers = [read_number(value) for value in values]
    except TypeError:
        return [f"gave {values!r:.80}, not a number for each text"] * num_texts
    if len(answers) == num_texts:
        return answers
    return [f"gave {len(answers)} numbers for {num_texts} texts"] * num_texts


def read_number(value: Any) -> Answer:
    """The finite number that it is; a boolean is 0 or 1."""
    try:
        # A text such as "1" is a mistake, not a number.
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:
        number = math.nan
    return number if math.isfinite(number) else f"gave {value!r:.80}, which is no finite number"


def raised(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {error}"


def _call(reward: Reward, text: str, prompt: Prompt) -> Answer:
    try:
        return read_number(reward.function(text, prompt))
    except Exception as error:
        return raised(error)


def prepare_process(pickled: dict[str, bytes]) -> None:
    """Have these rewards at hand in this process, for as long as the one that asks them lives."""
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    for name, one in pickled.items():
        try:
            _rewards[name] = cloudpickle.loads(one)
        except Exception as error:
            _rewards[name] = f"cannot be had in a process of its own: {raised(error)}"


def call_here(name: str, texts: Sequence[str], prompt: Prompt) -> tuple[list[Answer], float]:
    """The answers of the reward called `name`, and the seconds that they took."""
    reward, start = _rewards[name], time.perf_counter()
    if isinstance(reward, str):
        return [reward] * len(texts), 0.0
    return call_reward(reward, texts, prompt), time.perf_counter() - start


def _end_with_parent() -> None:
    """A reward that hangs would notice nothing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
