"""Prompts that are too long: dropped, cut or refused, and counted."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_trainer.config import GeneratorConfig, OnLongPrompt, TaskConfig
from forge_trainer.controller.checks import check_prompts
from forge_trainer.data import source as source_module
from forge_trainer.data.fitting import PromptLimit
from forge_trainer.data.prompts import Task, make_task
from forge_trainer.errors import ConfigError, DataError
from forge_trainer.metrics import metric_values
from forge_trainer.types import Message, Prompt

WORDS = ["one", "one two", "one two three", "one two three four five"]


def make_words(folder: Path, policy: OnLongPrompt, texts: list[str] = WORDS) -> Task:
    file = folder / "words.jsonl"
    file.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    config = TaskConfig.model_validate(
        {
            "name": "jsonl",
            "path": str(file),
            "columns": {"answer": None},
            "shuffle": False,
            "reward": "exact_match",
            "on_long_prompt": policy,
        }
    )
    return make_task(config, seed=0)


def count_words(prompt: Prompt) -> int:
    """One for every message, and one for each of its words."""
    if prompt.messages:
        return sum(1 + len(message.content.split()) for message in prompt.messages)
    return len(prompt.text.split())


def checked(task: Task, max_words: int) -> Task:
    generator = GeneratorConfig(max_prompt_tokens=max_words)
    return check_prompts(task, Path("nowhere"), generator, count=count_words)


def test_dropped_prompts_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        source = checked(make_words(tmp_path, "drop"), 2).prompts
    assert (
        "but of the task's first 4 prompts 2 have more tokens (task.on_long_prompt: drop)"
        in caplog.text
    )
    found = list(itertools.islice(source, 5))
    assert [prompt.text for prompt in found] == [*WORDS[:2], *WORDS[:2], WORDS[0]]
    assert [(prompt.key.epoch, prompt.key.index) for prompt in found[1:3]] == [(0, 1), (1, 0)]
    assert metric_values(source.metrics()) == {
        "prompts/epoch": 2,
        "prompts/dropped": 4,
        "prompts/truncated": 0,
    }


def test_cut_prompts_keep_their_end_and_are_counted(tmp_path: Path) -> None:
    source = checked(make_words(tmp_path, "truncate_left"), 2).prompts
    texts = [prompt.text.strip() for prompt in itertools.islice(source, 4)]
    assert texts[:2] == WORDS[:2]
    assert [len(text.split()) for text in texts[2:]] == [2, 2]
    assert "one two three".endswith(texts[2])
    assert WORDS[3].endswith(texts[3])
    assert metric_values(source.metrics())["prompts/truncated"] == 2


def test_what_must_fit_is_refused_before_the_start_or_when_it_comes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4, but of .* 4 prompts the longest has 5 tokens: 'one"):
        checked(make_words(tmp_path, "error"), 4)
    source = checked(make_words(tmp_path, "error", ["one"] * 300), 1).prompts
    assert len(list(itertools.islice(source, 600))) == 600
    late = checked(make_words(tmp_path, "error", ["one"] * 300 + ["one two"]), 1).prompts
    with pytest.raises(DataError, match="prompt 300 of .*words.jsonl' has 2 tokens, and .* is 1:"):
        list(itertools.islice(late, 301))


@pytest.mark.parametrize("policy", ["drop", "truncate_left"])
def test_prompts_that_never_fit_end_in_an_error_and_no_loop(
    tmp_path: Path, policy: OnLongPrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_words(tmp_path, policy)

    def count_ten(prompt: Prompt) -> int:
        return 10

    generator = GeneratorConfig(max_prompt_tokens=9)
    with pytest.raises(ConfigError, match="4 prompts the shortest has 10 tokens: 'one'; give at l"):
        check_prompts(task, Path("nowhere"), generator, count=count_ten)
    with pytest.raises(DataError, match="all 4 prompts of an epoch were too long; raise generator"):
        next(task.prompts.with_limit(PromptLimit(9, count_ten, policy)))
    monkeypatch.setattr(source_module, "MAX_DROPPED_IN_A_ROW", 50)
    endless = make_task(TaskConfig(on_long_prompt=policy), seed=0).prompts
    with pytest.raises(DataError, match="the last 50 prompts were all too long"):
        next(endless.with_limit(PromptLimit(9, count_ten, policy)))


@given(words=st.lists(st.sampled_from(["a", "bc", "def"]), max_size=20), most=st.integers(1, 8))
def test_the_longest_end_that_fits_is_kept(words: list[str], most: int) -> None:
    text = " ".join(words)
    prompt = Prompt(text, "")
    fitted = PromptLimit(most, count_words, "truncate_left").fit(prompt)
    wanted = next(text[i:] for i in range(len(text) + 1) if len(text[i:].split()) <= most)
    assert fitted is not None
    assert fitted.text == wanted


SYSTEM = Message("system", "be brief")
TURNS = (
    SYSTEM,
    Message("user", "one two three"),
    Message("assistant", "four"),
    Message("user", "five six"),
    Message("tool", "seven"),
)


@pytest.mark.parametrize(
    ("most", "wanted"),
    [
        (14, TURNS),
        (13, (SYSTEM, *TURNS[3:])),
        (8, (SYSTEM, *TURNS[3:])),
        (7, (SYSTEM, Message("user", " six"), TURNS[4])),
        (5, None),
    ],
)
def test_of_a_conversation_the_oldest_turns_go_first(
    most: int, wanted: tuple[Message, ...] | None
) -> None:
    """[system 3, user 4, assistant 2, user 3, tool 2] words, those of roles included."""
    prompt = Prompt("", "", messages=TURNS)
    fitted = PromptLimit(most, count_words, "truncate_left").fit(prompt)
    assert (fitted and fitted.messages) == wanted


def test_the_text_of_a_cut_question_is_cut_with_it() -> None:
    prompt = Prompt("one two", "", messages=(Message("user", "one two"),))
    fitted = PromptLimit(2, count_words, "truncate_left").fit(prompt)
    assert fitted is not None
    assert fitted.text == fitted.messages[0].content == " two"


def test_without_a_renderer_the_text_is_counted(tiny_qwen3: Path) -> None:
    task = check_prompts(make_task(TaskConfig(), seed=0), tiny_qwen3, GeneratorConfig())
    assert next(task.prompts).text[3] == ":"
    with pytest.raises(ConfigError, match="the shortest has 4 tokens"):
        check_prompts(task, tiny_qwen3, GeneratorConfig(max_prompt_tokens=3))
