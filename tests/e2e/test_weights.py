"""The check of weights as a user runs it."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path

import pytest

from apps.weights.main import main
from forge_trainer.config import OptimizerConfig, TrainerConfig
from forge_trainer.controller.in_process import start_in_process_trainer
from tests.data import random_sequences
from tests.e2e.apps import TINY, RunningApp
from tests.engines import FaultyEngine
from tests.processes import descendants

APP = "apps.weights.main"


@pytest.fixture
def run_folder(tiny_qwen3: Path, tmp_path: Path) -> Path:
    """A run's model, not of the config's sizes, and a checkpoint of other weights than it has."""
    folder = tmp_path / "run"
    model_dir = Path(shutil.copytree(tiny_qwen3, folder / "model"))
    config = TrainerConfig(device="cpu", optimizer=OptimizerConfig(lr=1e-2))

    async def train() -> None:
        trainer = await start_in_process_trainer(
            config, model_dir=model_dir, checkpoint_folder=folder / "checkpoints"
        )
        await trainer.train_step(random_sequences(), loss="grpo")
        await trainer.save()
        await trainer.close()

    asyncio.run(train())
    return folder


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    return {
        path: (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))
    }


def test_a_checkpoint_is_what_two_ranks_publish_and_both_generators_run_on(
    run_folder: Path,
) -> None:
    before = _files(run_folder)
    checkpoint = run_folder / "checkpoints" / "step-1"
    options = ["--run.folder", str(run_folder), "--checkpoint", str(checkpoint)]
    options += ["--generator.replicas", "2"]
    app = RunningApp(APP, ["verify", *TINY, *options]).start()
    app.wait_for_processes(4)
    code, out, err = app.finish()
    assert (code, err) == (0, ""), err
    checkpoint_line, published, *generators, last = out.splitlines()
    assert checkpoint_line.split() == ["checkpoint", f"{checkpoint},", "24", "tensors"]
    assert re.match(r"published +e1v0 by 2 ranks, 24 tensors, .* in float32, through", published)
    assert [line.split() for line in generators] == [
        ["generator/0", "e1v0,", "pulled"],
        ["generator/1", "e1v0,", "pulled"],
    ]
    assert last == "all 24 tensors are equal"
    assert _files(run_folder) == before


def test_a_tensor_that_is_published_wrong_is_named(run_folder: Path) -> None:
    """By an engine that adds 0.5 to one element; the generator pulls what is published."""
    engine = ["--trainer.engine", "tests.engines:FaultyEngine", "--trainer.num_ranks", "1"]
    app = RunningApp(APP, ["verify", *TINY, "--run.folder", str(run_folder), *engine]).start()
    app.wait_for_processes(2)
    code, out, err = app.finish()
    assert (code, err) == (1, ""), err
    (row,) = [line for line in out.splitlines() if FaultyEngine.DAMAGED in line]
    assert "published and model" in row
    assert "1 of 6144 elements, at most by 0.5" in row
    assert "published and generator: 0 of 24 tensors differ" in out
    assert "published and model: 1 of 24 tensors differ" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: python -m apps.weights.main verify"),
        (["verify"], "ConfigError: --config is missing; usage: python -m apps.weights.main verify"),
        (["verify", *TINY, "--trainer.num_rank", "2"], "did you mean trainer.num_ranks"),
        (["verify", *TINY, "--checkpoint", "/none"], "--checkpoint: checkpoint /none does not"),
        (["verify", *TINY, "--trainer.parallel.tensor", "2", "--model.tiny.num_kv_heads", "3"],
         "does not divide the model's 3 key-value heads"),
    ],
    ids=["command", "no config", "key", "checkpoint", "layout"],
)  # fmt: skip
def test_what_cannot_work_ends_with_2_before_any_process(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--run.folder", str(tmp_path / "run")] if len(arguments) > 1 else []
    before = descendants()
    assert main([*arguments, *folder]) == 2
    assert descendants() == before
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
