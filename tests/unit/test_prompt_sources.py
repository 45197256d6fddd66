"""Prompt sources: every row once an epoch, in a seeded order, resumable at any item."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_trainer.config import ColumnsConfig, TaskConfig
from forge_trainer.data.fitting import PromptLimit
from forge_trainer.data.order import Order
from forge_trainer.data.prompts import make_task
from forge_trainer.data.rows import Layout, one_by_one
from forge_trainer.data.rows.parquet import ParquetRows
from forge_trainer.data.source import PromptSource
from forge_trainer.errors import ConfigError, DataError
from forge_trainer.types import Prompt
from tests import own_prompts

NUM_ROWS = 23


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": "#" * (1 + i % 5) + str(i), "answer": i} for i in range(NUM_ROWS)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def configs(jsonl: str) -> dict[str, TaskConfig]:
    """A task of every kind of reading."""
    gym = {"min_terms": 2, "max_terms": 2, "size": 5}
    return {
        "jsonl": TaskConfig(name="jsonl", path=jsonl),
        "in order": TaskConfig(name="jsonl", path=jsonl, shuffle=False),
        "larger_digit": TaskConfig(),
        "reasoning_gym": TaskConfig(name="reasoning_gym/chain_sum", options=gym),
        "endless": TaskConfig(name="tests.own_prompts:endless", options={"largest": 50}),
        "seven": TaskConfig(name="tests.own_prompts:seven", columns=ColumnsConfig(id="id")),
        "list": TaskConfig(name="tests.own_prompts:listed"),
        "class": TaskConfig(name="tests.own_prompts:Counting"),
    }


KINDS = ["jsonl", "in order", "larger_digit", "reasoning_gym", "endless", "seven", "list", "class"]


def make_source(config: TaskConfig, *, seed: int = 3) -> PromptSource:
    """One that drops some prompts where it has long ones: more than five characters."""
    source = make_task(config, seed=seed, needs_reward=False).prompts
    if config.name.startswith("reasoning_gym"):
        return source
    return source.with_limit(PromptLimit(5, lambda prompt: len(prompt.text), "drop"))


def read(source: PromptSource, num_prompts: int) -> list[Prompt]:
    return list(itertools.islice(source, num_prompts))


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_resumes_after_any_item_and_over_epochs(
    configs: dict[str, TaskConfig], kind: str
) -> None:
    wanted = read(make_source(configs[kind]), 60)
    running = make_source(configs[kind])
    for k in range(55):
        resumed = make_source(configs[kind])
        resumed.load_state_dict(pickle.loads(pickle.dumps(running.state_dict())))
        assert read(resumed, 5) == wanted[k : k + 5], f"after {k} items"
        assert next(running) == wanted[k]
    assert len({(p.key.epoch, p.key.index) for p in wanted}) == len(wanted)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(lengths=st.lists(st.integers(0, 40), max_size=6))
def test_a_run_that_is_cut_into_pieces_reads_what_a_whole_one_reads(
    configs: dict[str, TaskConfig], kind: str, lengths: list[int]
) -> None:
    whole = make_source(configs[kind])
    wanted = read(whole, sum(lengths))
    found, state = list[Prompt](), make_source(configs[kind]).state_dict()
    for length in lengths:
        piece = make_source(configs[kind])
        piece.load_state_dict(state)
        found += read(piece, length)
        state = piece.state_dict()
    assert found == wanted
    assert state["num_dropped"] == whole.num_dropped


@pytest.mark.parametrize("kind", ["jsonl", "reasoning_gym", "endless", "seven", "list"])
def test_a_state_is_plain_json(configs: dict[str, TaskConfig], kind: str) -> None:
    source = make_source(configs[kind])
    read(source, 9)
    resumed = make_source(configs[kind])
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert read(resumed, 20) == read(source, 20)


def test_every_row_comes_once_an_epoch_in_a_new_order(jsonl: str) -> None:
    source = make_task(TaskConfig(name="jsonl", path=jsonl, reward="exact_match"), seed=0).prompts
    epochs = [read(source, NUM_ROWS) for _ in range(3)]
    orders = [[prompt.key.index for prompt in prompts] for prompts in epochs]
    assert all(sorted(order) == list(range(NUM_ROWS)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert [prompt.key.epoch for prompts in epochs for prompt in prompts] == sorted(
        [0, 1, 2] * NUM_ROWS
    )
    other = make_task(TaskConfig(name="jsonl", path=jsonl, reward="exact_match"), seed=1).prompts
    assert [prompt.key.index for prompt in read(other, NUM_ROWS)] not in orders


def test_without_shuffling_rows_come_as_they_are_and_end_after_the_epochs(jsonl: str) -> None:
    config = TaskConfig(name="jsonl", path=jsonl, shuffle=False, epochs=2, reward="exact_match")
    source = make_task(config, seed=0).prompts
    assert [prompt.answer for prompt in source] == [str(i) for i in range(NUM_ROWS)] * 2
    assert list(source) == []
    ended = make_task(config, seed=0).prompts
    ended.load_state_dict(source.state_dict())
    assert list(ended) == []


def test_keys_tell_prompts_apart_and_name_them(configs: dict[str, TaskConfig]) -> None:
    keys = [prompt.key for prompt in read(make_source(configs["seven"]), 8)]
    assert sorted(key.id for key in keys[:7]) == [f"n{i}" for i in range(7)]
    assert [(key.epoch, key.index) for key in keys] == [(0, i) for i in range(7)] + [(1, 0)]
    row = read(make_source(configs["jsonl"]), 1)[0]
    assert row.key.id == str(row.key.index) == row.answer


def test_a_generator_function_gets_another_seed_every_epoch(configs: dict[str, TaskConfig]) -> None:
    texts = [prompt.text for prompt in read(make_source(configs["seven"], seed=3), 14)]
    wanted = [row["prompt"] for seed in (3, 4) for row in own_prompts.seven(seed=seed)]
    assert texts == wanted


def test_an_object_that_keeps_its_state_is_asked_for_it(configs: dict[str, TaskConfig]) -> None:
    source = make_source(configs["class"], seed=1)
    read(source, 5)
    state = source.state_dict()
    read(source, 5)
    assert state["pass"]["own"]["next"] == 105, "what is saved must not go on to change"
    resumed = make_source(configs["class"], seed=1)
    resumed.load_state_dict(state)
    assert next(resumed).text == "105"
    assert resumed.state_dict()["pass"]["own"]["resumed"] == 1


def test_an_object_may_bring_a_reward(configs: dict[str, TaskConfig]) -> None:
    task = make_task(configs["class"], seed=0)
    assert task.reward is not None
    assert task.reward("0", next(task.prompts)) == 2.0


def test_peeking_moves_nothing(configs: dict[str, TaskConfig]) -> None:
    for config in configs.values():
        source = make_source(config)
        before = read(source, 3)
        peeked = source.peek(4)
        assert peeked[0].key.epoch == 0
        assert len(peeked) == 4
        assert before + read(source, 9) == read(make_source(config), 12)


def test_a_place_in_other_data_is_refused(jsonl: str, tmp_path: Path) -> None:
    config = TaskConfig(name="jsonl", path=jsonl, reward="exact_match")
    state = make_task(config, seed=0).prompts.state_dict()
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text('{"prompt": "a", "answer": 1}\n')
    changes: list[dict[str, Any]] = [{"shuffle": False}, {"path": str(shorter)}]
    for change in changes:
        other = make_task(config.model_copy(update=change), seed=0).prompts
        with pytest.raises(ConfigError, match="give the same data, seed and task.shuffle"):
            other.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"saved place is one in {'seed': 0, .*'seed': 1"):
        make_task(config, seed=1).prompts.load_state_dict(state)


def test_a_generator_function_that_ends_early_on_resumption_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_prompts.shrinking, "left", 9, raising=False)
    config = TaskConfig(name="tests.own_prompts:shrinking", reward="exact_match")
    source = make_task(config, seed=0).prompts
    read(source, 6)
    monkeypatch.setattr(own_prompts.shrinking, "left", 4)
    with pytest.raises(DataError, match="gave 6 items when its state was saved, and now ends af"):
        source.load_state_dict(source.state_dict())


@given(
    blocks=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    held=st.integers(1, 13),
    seed=st.integers(0, 2**62 - 1),
    epoch=st.integers(0, 5),
)
def test_an_order_has_every_row_once_and_holds_no_more_blocks_than_it_may(
    blocks: list[int], held: int, seed: int, epoch: int
) -> None:
    order = Order(Layout(blocks, held), seed=seed, epoch=epoch)
    rows = [order.row_at(position) for position in range(sum(blocks))]
    assert sorted(rows) == list(range(sum(blocks)))
    block_of = [number for number, size in enumerate(blocks) for _ in range(size)]
    left = Counter(block_of)
    begun = set[int]()
    for row in rows:
        begun.add(block_of[row])
        left[block_of[row]] -= 1
        assert sum(left[block] > 0 for block in begun) <= held
    again = Order(Layout(blocks, held), seed=seed, epoch=epoch)
    backwards = [again.row_at(position) for position in reversed(range(sum(blocks)))]
    assert backwards[::-1] == rows, "an order may be asked anywhere"


def test_orders_stay_what_they_are() -> None:
    """A run that goes on with another NumPy, or another version of this, needs the same ones."""
    order = Order(one_by_one(10), seed=0, epoch=0)
    assert [order.row_at(i) for i in range(10)] == [7, 1, 0, 9, 5, 4, 8, 3, 6, 2]
    windows = Order(Layout([3, 3, 3, 3], held=2), seed=2**40, epoch=1)
    assert [windows.row_at(i) for i in range(12)] == [10, 2, 1, 0, 9, 11, 8, 7, 5, 4, 6, 3]


def test_large_data_is_shuffled_in_blocks() -> None:
    assert one_by_one(3 * 2**20 + 5).blocks == [2**20] * 3 + [5]
    assert one_by_one(2**20).blocks == [2**20]


def test_a_row_group_is_read_once_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row in any order, each would be decoded again for every row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for number, file in enumerate(files):
        table = pa.table({"prompt": [f"{number}:{i}" for i in range(40)], "answer": range(40)})
        pq.write_table(table, file, row_group_size=10)
    one_group = pq.read_metadata(files[0]).row_group(0).total_byte_size
    rows = ParquetRows(files, held_bytes=int(3.5 * one_group))
    assert list(rows.layout.blocks) == [10] * 8
    assert rows.layout.held == 3
    reads = list[int]()
    plain = pq.ParquetFile.read_row_group

    def counted(self: Any, group: int) -> Any:
        reads.append(group)
        return plain(self, group)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    order = Order(rows.layout, seed=0, epoch=0)
    found = [rows.row(order.row_at(position))["prompt"] for position in range(80)]
    assert sorted(found) == sorted(f"{number}:{i}" for number in (0, 1) for i in range(40))
    assert sorted(reads) == sorted([0, 1, 2, 3] * 2)
