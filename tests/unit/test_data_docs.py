"""What docs/data.md shows works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge_trainer.config import GrpoConfig, TaskConfig
from forge_trainer.config.load import load_config
from forge_trainer.data.prompts import make_task
from forge_trainer.types import Prompt

DOCUMENT = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def load(block: str, folder: Path) -> TaskConfig:
    file = folder / "config.yaml"
    file.write_text("run: {folder: out, steps: 3}\nmodel: {tiny: {}}\n" + block)
    return load_config(GrpoConfig, file).task


def test_every_config_loads(tmp_path: Path) -> None:
    names = [load(block, tmp_path).name for block in blocks("yaml")]
    assert names == ["jsonl", "parquet", "huggingface", "my_package.my_module:products"]


def test_the_file_is_asked_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(blocks("yaml")[0], tmp_path)
    assert config.path is not None
    Path(config.path).parent.mkdir()
    Path(config.path).write_text(blocks("json")[0])
    task = make_task(config, seed=0)
    assert task.reward is not None
    prompts = list(task.prompts)
    assert [(prompt.text, prompt.answer) for prompt in prompts] == [("2 + 3 =", "5")] * 2
    assert prompts[0].metadata == {"level": 1}
    assert task.reward("5", prompts[0]) == 1.0


def test_data_of_other_trainers_is_read_as_it_is(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {
        "prompt": [{"role": "user", "content": "2 + 3 ="}],
        "reward_model": {"ground_truth": "5", "style": "rule"},
        "extra_info": {"index": 7},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train-0.parquet")
    config = load(blocks("yaml")[1], tmp_path)
    here = {"path": str(tmp_path / "train-*.parquet"), "reward": "exact_match"}
    prompt = next(make_task(config.model_copy(update=here), seed=0).prompts)
    assert (prompt.text, prompt.answer, prompt.key.id) == ("2 + 3 =", "5", "7")


def test_the_function_and_the_script_run() -> None:
    function, script = blocks("python")
    names: dict[str, Any] = {}
    exec(function, names)
    options = yaml.safe_load(blocks("yaml")[3])["task"]["options"]
    prompt: Prompt = next(names["products"](seed=0, **options))
    assert eval(prompt.text.removesuffix("=")) == int(prompt.answer)
    exec(script, {})
