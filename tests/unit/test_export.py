"""An export to a Hugging Face directory by ranks that are threads here: who waits for whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forge_trainer.engine.checkpoint import export
from forge_trainer.engine.checkpoint.export import INDEX, HfWriter
from forge_trainer.errors import CheckpointError
from tests.ranks import ThreadGroup, thread_groups
from tests.waiting import Gate, wait_until

TENSORS = {f"layer.{i}": torch.full((2, 4), float(i)) for i in range(7)}
"""32 bytes each."""


class Counted:
    """Tensors as a rank gathers them, counted."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.count = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for item in self._tensors.items():
            self.count += 1
            yield item


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 64)


def _export(*works: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(works)) as threads:
        return [future.result() for future in [threads.submit(work) for work in works]]


def _require_all(folder: Path) -> None:
    """The directory holds the tensors, where its index says."""
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == 32 * len(TENSORS)
    assert index["weight_map"].keys() == TENSORS.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], TENSORS[name])


def test_no_rank_gathers_ahead_while_another_writes(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NCCL, gathering does not wait for the writer: 707 collectives stood in a queue, with the
    clock of each running, while rank 0 wrote 131 GB."""
    gate, save, folder = Gate(), export.save_file, tmp_path / "out"
    folder.mkdir()

    def slow_save(*args: Any, **kwargs: Any) -> None:
        gate.pass_through()
        save(*args, **kwargs)

    monkeypatch.setattr(export, "save_file", slow_save)
    gathered = [Counted(TENSORS) for _ in range(3)]

    def work(group: ThreadGroup) -> Callable[[], set[str]]:
        def write() -> set[str]:
            writer = HfWriter(folder, part="stage0", group=group, writes=group.rank == 0)
            writer.add(gathered[group.rank])
            return writer.finish(model_dir)

        return write

    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(work(group)) for group in thread_groups(3)]
        try:
            # A file of two tensors is being written, and the next tensor is gathered.
            wait_until(lambda: [own.count for own in gathered] == [3, 3, 3], "three tensors each")
            asyncio.run(gate.reached())
            assert [own.count for own in gathered] == [3, 3, 3]
        finally:
            gate.open()
        files = [future.result() for future in running]
    assert files == [{f"model-stage0-{n:05d}.safetensors" for n in (1, 2, 3, 4)}, set(), set()]
    _require_all(folder)


def test_parts_with_different_numbers_of_files_meet(tmp_path: Path, model_dir: Path) -> None:
    """Stages of a pipeline hold different amounts; a rank that is done goes on meeting."""
    parts = [dict(list(TENSORS.items())[:1]), dict(list(TENSORS.items())[1:])]

    def work(group: ThreadGroup) -> Callable[[], set[str]]:
        def write() -> set[str]:
            writer = HfWriter(tmp_path, part=f"stage{group.rank}", group=group)
            writer.add(parts[group.rank].items())
            return writer.finish(model_dir)

        return write

    files = _export(*(work(group) for group in thread_groups(2)))
    assert [len(own) for own in files] == [1, 3]
    _require_all(tmp_path)


def test_a_writer_that_fails_leaves_nobody_waiting(tmp_path: Path, model_dir: Path) -> None:
    def work(group: ThreadGroup) -> Callable[[], str]:
        def write() -> str:
            writer = HfWriter(tmp_path / "missing", part="stage0", group=group)
            writer.add(TENSORS.items())
            with pytest.raises(CheckpointError) as caught:
                writer.finish(model_dir)
            return str(caught.value)

        return write

    errors = _export(*(work(group) for group in thread_groups(2)))
    assert errors[0] == errors[1]
    assert "model-stage0-00001.safetensors" in errors[0]
