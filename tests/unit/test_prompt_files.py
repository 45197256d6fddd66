"""Files of prompts: what their columns become, and one clear error for what cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from forge_trainer.config import ColumnsConfig, TaskConfig
from forge_trainer.data import prompts
from forge_trainer.data.messages import parse_messages
from forge_trainer.data.prompts import make_task
from forge_trainer.data.source import PromptSource
from forge_trainer.errors import ConfigError, DataError
from forge_trainer.types import Message, Prompt, PromptKey, ToolCall

ROWS = [
    {"question": f"{i} + 1 =", "answer": i + 1, "level": {"of": i % 2}, "tags": ["sum"]}
    for i in range(6)
]
SUMS = ColumnsConfig(prompt="question")


def write_jsonl(folder: Path, rows: list[dict[str, Any]]) -> TaskConfig:
    file = folder / "train.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return TaskConfig(name="jsonl", path=str(file))


def write_parquet(folder: Path, rows: list[dict[str, Any]]) -> TaskConfig:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number in range(2):
        part = rows[number * 3 : number * 3 + 3]
        if part:
            pq.write_table(pa.Table.from_pylist(part), folder / f"train-{number}.parquet")
    return TaskConfig(name="parquet", path=str(folder / "train-*.parquet"))


def save_dataset(folder: Path, rows: list[dict[str, Any]]) -> TaskConfig:
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(folder / "saved")
    return TaskConfig(name="huggingface", path=str(folder / "saved"))


def save_splits(folder: Path, rows: list[dict[str, Any]]) -> TaskConfig:
    from datasets import Dataset, DatasetDict

    splits = DatasetDict(train=Dataset.from_list(rows), test=Dataset.from_list(rows[:1]))
    splits.save_to_disk(folder / "splits")
    options = {"split": "train"}
    return TaskConfig(name="huggingface", path=str(folder / "splits"), options=options)


def directory_of_files(folder: Path, rows: list[dict[str, Any]]) -> TaskConfig:
    (folder / "files").mkdir()
    write_parquet(folder / "files", rows)
    options = {"split": "train", "cache_dir": str(folder / "cache")}
    return TaskConfig(name="huggingface", path=str(folder / "files"), options=options)


WRITERS = [write_jsonl, write_parquet, save_dataset, save_splits, directory_of_files]


def open_source(config: TaskConfig, **changes: Any) -> PromptSource:
    changes = {"reward": "exact_match"} | changes
    return make_task(config.model_copy(update=changes), seed=0).prompts


@pytest.mark.parametrize("write", WRITERS)
def test_columns_become_prompts(
    tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], TaskConfig]
) -> None:
    config = write(tmp_path, ROWS)
    found = open_source(config, columns=SUMS, shuffle=False).peek(9)
    assert found == [
        Prompt(
            text=f"{i} + 1 =",
            answer=str(i + 1),
            task=config.path or "",
            metadata={"level": {"of": i % 2}, "tags": ["sum"]},
            key=PromptKey(0, i, str(i)),
        )
        for i in range(6)
    ]
    shuffled = open_source(config, columns=SUMS).peek(9)
    assert sorted(prompt.text for prompt in shuffled) == [prompt.text for prompt in found]
    assert shuffled != found


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, save_dataset])
def test_a_conversation_becomes_messages(
    tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], TaskConfig]
) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}]
    config = write(tmp_path, [{"chat": chat, "truth": {"value": 2.5, "style": "rule"}, "id": 7}])
    columns = ColumnsConfig(messages="chat", answer="truth.value", id="id")
    (prompt,) = open_source(config, columns=columns).peek(2)
    assert prompt == Prompt(
        text="Hi?",
        answer="2.5",
        task=config.path or "",
        metadata={"truth": {"value": 2.5, "style": "rule"}},
        messages=(Message("system", "Be brief."), Message("user", "Hi?")),
        key=PromptKey(0, 0, "7"),
    )


def test_tools_and_parts_are_understood() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "1 "}, {"text": "+ 1"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function}]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "tool_calls": None},
    ]
    assert parse_messages(given) == (
        Message("user", "1 + 1"),
        Message("assistant", "", (ToolCall("add", {"a": 1}, "c1"),)),
        Message("tool", "2", tool_call_id="c1"),
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "at least one; got list"),
        ("hi", "a list of messages, at least one; got str hi"),
        (["hi"], "message 0 must be a mapping, got str"),
        ([{"role": "developer", "content": "x"}], "has the role 'developer'; known are system, us"),
        ([{"role": "user"}], "message 0, the user's, has no content"),
        ([{"role": "user", "content": 3}], "must be text or parts, got int"),
        ([{"role": "user", "content": [{"image": 1}]}], "has a part that is not text"),
        ([{"role": "assistant", "tool_calls": [{}]}], "a tool call has no function with a name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments of a call are not JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1"}}]}],
            "arguments of a call must be a mapping: 1",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_messages(given)


GOOD = '{"prompt": "a", "answer": "b"}\n'


@pytest.mark.parametrize(
    ("line", "columns", "message"),
    [
        ('{"prompt": "a", "answer": ', {}, "it is not JSON: Expecting value at character 26"),
        ("[1]", {}, "it must be a JSON object, got list"),
        ('{"prompt": "a", "prompt": "b", "answer": 1}', {}, "it has 'prompt' twice"),
        (
            '{"question": "a", "answer": 1}',
            {},
            "columns.prompt: there is no column 'prompt'; there are q",
        ),
        ('{"prompt": "a"}', {}, "task.columns.answer: there is no column 'answer'; there are pr"),
        ('{"prompt": "a", "answer": null}', {}, "task.columns.answer: 'answer' is null"),
        ('{"prompt": "a", "answer": [1]}', {}, r"must be text or a number, got list \[1\]; other"),
        ('{"prompt": "a", "answer": NaN}', {}, "must be text or a number, got float nan"),
        ('{"prompt": "", "answer": 1}', {}, "must be text, at least one character of it; got str"),
        ('{"prompt": 3, "answer": 1}', {}, "must be text, at least one character of it; got int 3"),
        (
            '{"prompt": [{"role": "user", "content": "a"}], "answer": 1}',
            {},
            "is a list; if it is a conversation, give task.columns.messages: prompt",
        ),
        (
            '{"prompt": [{"role": "assistant", "content": "a"}], "answer": 1}',
            {"messages": "prompt"},
            "the conversation in 'prompt' ends with the assistant's words",
        ),
        ('{"prompt": "a", "answer": 1, "a": {"b": 1}}', {"id": "a.c"}, "there is no column 'a.c'"),
    ],
)
def test_a_malformed_line_is_told_by_file_and_line_before_anything_starts(
    tmp_path: Path, line: str, columns: dict[str, str], message: str
) -> None:
    """Blank lines are no rows, and count as lines."""
    file = tmp_path / "train.jsonl"
    file.write_text("\n  \n" + (GOOD * 2 if not columns else "") + line + "\n\n")
    number = 3 if columns else 5
    config = TaskConfig(name="jsonl", path=str(file), columns=ColumnsConfig(**columns))
    with pytest.raises(ConfigError, match=f"^task.path: {file}, line {number}: .*{message}"):
        open_source(config)


def test_a_malformed_line_far_down_is_told_when_it_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "CHECKED_ROWS", 2)
    file = tmp_path / "train.jsonl"
    file.write_bytes(GOOD.encode() * 2 + b'{"prompt": "\xff"}\n')
    source = open_source(TaskConfig(name="jsonl", path=str(file)), shuffle=False)
    assert [next(source).text, next(source).text] == ["a", "a"]
    with pytest.raises(DataError, match=f"^{file}, line 3: it is not UTF-8: invalid start byte at"):
        next(source)
    file.unlink()
    with pytest.raises(DataError, match="it cannot be read: No such file"):
        next(source)


def test_a_byte_order_mark_and_foreign_line_ends_are_no_trouble(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode() * 2 + b"\r\n")
    source = open_source(TaskConfig(name="jsonl", path=str(file)))
    assert [prompt.text for prompt in source.peek(9)] == ["a", "a"]


def test_files_of_a_pattern_are_read_one_after_another(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(f'{{"prompt": "{name}{i}", "answer": 0}}\n' for i in range(2))
        )
    (tmp_path / "c.jsonl").write_text('\n{"prompt": "c"}\n')
    config = TaskConfig(name="jsonl", path=f"{tmp_path}/[ab].jsonl", shuffle=False)
    found = open_source(config).peek(9)
    assert [prompt.text for prompt in found] == ["a0", "a1", "b0", "b1"]
    with pytest.raises(ConfigError, match="c.jsonl, line 2: .*no column 'answer'"):
        open_source(config, path=f"{tmp_path}/*.jsonl")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.jsonl", r"there is no .*/gone.jsonl; .* holds empty.jsonl, files, one.txt$"),
        ("gone/train.jsonl", r"there is no .*; .* holds empty.jsonl, files, one.txt$"),
        ("*.json", r"there is no .*/\*.json; .* holds empty.jsonl, files, one.txt$"),
        ("files", r"files is a directory; give a file or a pattern, such as .*it holds nothing$"),
        ("empty.jsonl", "empty.jsonl holds no line"),
    ],
)
def test_a_path_without_prompts_says_what_there_is(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "one.txt").touch()
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match=f"^task.path: .*{message}"):
        open_source(TaskConfig(name="jsonl", path=str(tmp_path / path)))


def test_parquet_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "train.parquet"
    config = TaskConfig(name="parquet", path=str(file))
    file.write_bytes(b"PAR1, but no more")
    with pytest.raises(ConfigError, match=f"^task.path: {file} is no Parquet file: "):
        open_source(config)
    twice = pa.table([pa.array(["a"])] * 3, names=["prompt", "answer", "prompt"])
    pq.write_table(twice, file)
    with pytest.raises(ConfigError, match=r"has columns twice: \['prompt'\]; rename one of each"):
        open_source(config)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), file)
    with pytest.raises(ConfigError, match="holds no row"):
        open_source(config)
    pq.write_table(pa.table({"prompt": ["a", "b", None], "answer": [1, 2, 3]}), file)
    with pytest.raises(ConfigError, match=f"{file}, row 2 counted from 0: .*'prompt' is null"):
        open_source(config)
    pq.write_table(pa.table({"question": ["a"], "answer": [1]}), file)
    with pytest.raises(ConfigError, match="no column 'prompt'; there are question, answer"):
        open_source(config)


def test_a_data_set_that_cannot_be_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = save_splits(tmp_path, ROWS)
    with pytest.raises(ConfigError, match=r"has the splits \['test', 'train'\]; choose one"):
        open_source(splits, options={})
    with pytest.raises(ConfigError, match=r"no split 'dev'; it has \['test', 'train'\]"):
        open_source(splits, options={"split": "dev"})
    with pytest.raises(ConfigError, match=r"knows split alone, got \['name', 'split'\]"):
        open_source(splits, options={"split": "train", "name": "main"})
    with pytest.raises(ConfigError, match="row 0 counted from 0: .*there is no column 'prompt'"):
        open_source(splits)
    with pytest.raises(ConfigError, match=f"{tmp_path}/gone is no directory; give one, or a hub"):
        open_source(splits, path=f"{tmp_path}/gone")
    files = directory_of_files(tmp_path, ROWS)
    with pytest.raises(ConfigError, match="is streamed and its rows cannot be counted"):
        open_source(files, options={**files.options, "streaming": True})
    with pytest.raises(ConfigError, match='datasets cannot load .*Unknown split "dev"'):
        open_source(files, options={**files.options, "split": "dev"})
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="datasets cannot load 'nobody/nothing' with options"):
        open_source(splits, path="nobody/nothing")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "jsonl"}, "path is missing, and name is 'jsonl'; jsonl, parquet, huggingface n"),
        ({"path": "a.jsonl"}, "path is given, a.jsonl, and name is 'larger_digit'"),
        ({"columns": {"prompt": "x"}}, "columns are given, and 'larger_digit' has none"),
        ({"columns": {"question": "x"}}, "columns.question\n"),
        ({"on_long_prompt": "cut"}, "'drop', 'truncate_left' or 'error'"),
        ({"epochs": 0}, "greater than 0"),
    ],
)
def test_configs_that_say_nothing_of_use_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TaskConfig.model_validate(values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "jsonl", "path": "x", "options": {"a": 1}}, "task.options: jsonl takes none"),
        ({"name": "tests.gone:x"}, "task.name 'tests.gone:x' cannot be imported"),
        (
            {"name": "tests.own_prompts:seven", "options": {"x": 1}},
            "cannot be called with seed=0",
        ),
        ({"name": "tests.own_prompts:one"}, "made Prompt; it must yield prompts"),
        ({"name": "tests.own_prompts:asynchronous"}, "made async_generator; it must yield prompts"),
        ({"name": "tests.own_prompts:nothing"}, "made list without an item"),
        (
            {"name": "tests.own_prompts:seven", "reward": None},
            r"task.reward: tests.own_prompts:seven brings none .* \['exact_match', 'starts_with_",
        ),
    ],
)
def test_tasks_that_cannot_be_made_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(TaskConfig(**({"reward": "exact_match"} | config)), seed=0)


def test_a_function_that_fails_is_named_with_its_item() -> None:
    config = TaskConfig(name="tests.own_prompts:failing", reward="exact_match")
    source = make_task(config, seed=0).prompts
    assert next(source).text == "one"
    with pytest.raises(DataError, match="own_prompts:failing failed at item 1: KeyError: 'two'"):
        next(source)
    columns = ColumnsConfig(prompt="question")
    wrong = TaskConfig(name="tests.own_prompts:seven", columns=columns, reward="exact_match")
    with pytest.raises(DataError, match="seven, item 0: .*no column 'question'; there are prompt"):
        next(make_task(wrong, seed=0).prompts)


def test_a_task_without_a_reward_is_for_environments_that_judge(tmp_path: Path) -> None:
    config = write_jsonl(tmp_path, ROWS).model_copy(update={"columns": SUMS})
    assert make_task(config, seed=0, needs_reward=False).reward is None
    with pytest.raises(ConfigError, match="task.reward: jsonl brings none of its own"):
        make_task(config, seed=0)
