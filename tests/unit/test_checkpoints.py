"""Checkpoints of the in-process trainer: what is kept, what is found, what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from forge_trainer.config import GeneratorConfig, ProfilingConfig, TrainerConfig
from forge_trainer.controller.checks import check_generator, check_trainer
from forge_trainer.controller.in_process import start_in_process_trainer
from forge_trainer.engine.checkpoint import checkpointer
from forge_trainer.engine.checkpoint.checkpointer import Checkpointer
from forge_trainer.engine.checkpoint.files import hash_file, read_marker, verify_files
from forge_trainer.errors import CheckpointError
from forge_trainer.hf import load_causal_lm
from forge_trainer.types import CheckpointInfo, LossOutput, SaveRequest, TrainBatch
from tests.data import same_numbers
from tests.ranks import thread_groups
from tests.unit.conftest import CONFIG, GOOD, Bench
from tests.waiting import A_HANG_S

LOCAL = CONFIG.model_copy(update={"engine": "local"})


def test_checkpoints_are_found_by_age_name_step_and_path(bench: Bench, tmp_path: Path) -> None:
    trainer = bench.trainer
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        bench.run(trainer.load())
    for _ in range(2):
        bench.run(trainer.train_step(GOOD, loss="grpo"))
        bench.run(trainer.save())
    (tmp_path / "checkpoints" / "step-9").mkdir()
    assert bench.run(trainer.load()).step == 2
    assert bench.run(trainer.load(step=1)).step == 1
    assert bench.run(trainer.get_status()).step == 1
    elsewhere = str(tmp_path / "elsewhere")
    assert bench.run(trainer.save(path=elsewhere)).path == elsewhere
    assert bench.run(trainer.load(path=elsewhere)).step == 1
    for given, message in (
        ({"step": 9}, "lacks forge_trainer.json, so it is incomplete"),
        ({"name": "none"}, "does not exist"),
        ({"name": "a", "step": 1}, "at most one of"),
    ):
        with pytest.raises(CheckpointError, match=message):
            bench.run(trainer.load(**given))
    with pytest.raises(CheckpointError, match="exists already"):
        bench.run(trainer.save("step-1"))


def test_save_refuses_to_lose_gradients(bench: Bench) -> None:
    bench.run(bench.trainer.forward_backward(GOOD, loss="grpo"))
    with pytest.raises(CheckpointError, match="gradients are accumulated"):
        bench.run(bench.trainer.save())


def _damage(checkpoint: Path, how: str) -> None:
    data = checkpoint / "state" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif how == "truncated":
        data.write_bytes(content[:-10])
    elif how == "metadata":
        (checkpoint / "weights" / ".metadata").unlink()
    else:
        (checkpoint / "forge_trainer.json").write_text("{")


@pytest.mark.parametrize("how", ["flipped", "truncated", "metadata", "marker"])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_loaded(bench: Bench, how: str) -> None:
    trainer = bench.trainer
    saved = bench.run(trainer.save())
    _damage(Path(saved.path), how)
    bench.run(trainer.train_step(GOOD, loss="grpo"))
    before = bench.run(trainer.forward(GOOD)).logprobs
    wanted = {"metadata": ".metadata is missing", "marker": "forge_trainer.json is damaged"}
    with pytest.raises(CheckpointError, match=wanted.get(how, ".distcp is damaged")):
        bench.run(trainer.load(path=saved.path))
    assert same_numbers(bench.run(trainer.forward(GOOD)).logprobs, before)
    assert bench.run(trainer.get_status()).step == 1


def test_weights_alone_are_read_and_verified_alone(bench: Bench, tmp_path: Path) -> None:
    """It once hashed the optimizer's state, two thirds of the bytes, to use none of it."""
    trainer = bench.trainer
    wanted = bench.run(trainer.forward(GOOD)).logprobs
    saved = Path(bench.run(trainer.save()).path)
    bench.run(trainer.train_step(GOOD, loss="grpo"))
    shutil.rmtree(saved / "state")
    with pytest.raises(CheckpointError, match=r"state/\S+ is missing"):
        bench.run(trainer.load(path=str(saved)))
    bench.run(trainer.load(path=str(saved), weights_only=True))
    assert same_numbers(bench.run(trainer.forward(GOOD)).logprobs, wanted)
    data = saved / "weights" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="weights/__0_0.distcp is damaged"):
        bench.run(trainer.load(path=str(saved), weights_only=True))


def _save_on_two_ranks(
    folder: Path, write: Callable[[Path, int], set[str]]
) -> list[CheckpointInfo | CheckpointError]:
    groups = thread_groups(2)
    request = SaveRequest(str(folder / "step-1"), format="hf")

    def save(rank: int) -> CheckpointInfo | CheckpointError:
        one = Checkpointer(groups[rank], torch.device("cpu"), layout="two threads")
        try:
            return one.export(request, 1, lambda partial: write(partial, rank))
        except CheckpointError as error:
            return error
        finally:
            one.close()

    with ThreadPoolExecutor(2, thread_name_prefix="rank") as ranks:
        return list(ranks.map(save, range(2)))


def test_a_rank_hashes_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files were dealt by name, so nearly every rank read back what another host had written."""
    hashed: list[tuple[str, str]] = []

    def watched(file: Path) -> str:
        hashed.append((threading.current_thread().name, file.name))
        return hash_file(file)

    monkeypatch.setattr(checkpointer, "hash_file", watched)
    writers: dict[int, str] = {}

    def write(partial: Path, rank: int) -> set[str]:
        writers[rank] = threading.current_thread().name
        (partial / f"of_{rank}").write_text(f"{rank}")
        if rank == 0:
            (partial / "config.json").write_text("{}")
        return {f"of_{rank}"}

    first, second = _save_on_two_ranks(tmp_path, write)
    assert first == second
    wanted = {(writers[0], "of_0"), (writers[0], "config.json"), (writers[1], "of_1")}
    assert set(hashed) == wanted
    marker = read_marker(tmp_path / "step-1")
    assert marker.xxh3_128.keys() == {"of_0", "of_1", "config.json"}


def test_a_folder_that_only_some_ranks_share_is_named(tmp_path: Path) -> None:
    def write(partial: Path, rank: int) -> set[str]:
        # On a disk of its own, the first rank would not see it.
        return {f"of_{rank}"} if rank == 1 else set()

    for error in _save_on_two_ranks(tmp_path, write):
        assert isinstance(error, CheckpointError)
        assert re.search("first rank does not see of_1.*storage that all hosts share", str(error))
    assert list(tmp_path.iterdir()) == []


def test_an_hf_export_loads_in_transformers(bench: Bench, tmp_path: Path) -> None:
    """Same logits, and a trainer can start from it."""
    bench.run(bench.trainer.train_step(GOOD, loss="grpo"))
    saved = bench.run(bench.trainer.save(path=str(tmp_path / "hf"), format="hf"))
    assert (saved.format, saved.weights_only, saved.step) == ("hf", True, 1)
    model = load_causal_lm(saved.path, dtype=torch.float32, device=torch.device("cpu"))
    sequence = GOOD[0]
    ids = torch.tensor([list(sequence.token_ids)])
    with torch.no_grad():
        log_p = torch.log_softmax(model(ids).logits[0] / sequence.temperature, -1)
    wanted = [0.0, *log_p[range(len(sequence) - 1), ids[0, 1:]].tolist()]
    found = bench.run(bench.trainer.forward([sequence])).logprobs[0]
    assert found == pytest.approx(wanted, abs=1e-5)
    with pytest.raises(CheckpointError, match="start a trainer from it with model.path"):
        bench.run(bench.trainer.load(path=saved.path))
    check_trainer(Path(saved.path), CONFIG)
    check_generator(Path(saved.path), GeneratorConfig(max_prompt_tokens=8))


def test_weights_alone_can_be_saved_and_loaded(bench: Bench, tmp_path: Path) -> None:
    trainer = bench.trainer
    bench.run(trainer.train_step(GOOD, loss="grpo"))
    saved = bench.run(trainer.save("weights", weights_only=True))
    wanted = bench.run(trainer.forward(GOOD)).logprobs
    bench.run(trainer.train_step(GOOD, loss="grpo"))
    with pytest.raises(CheckpointError, match="holds weights only"):
        bench.run(trainer.load(path=saved.path))
    assert bench.run(trainer.load(name="weights", weights_only=True)).weights_only
    assert same_numbers(bench.run(trainer.forward(GOOD)).logprobs, wanted)
    assert bench.run(trainer.get_status()).step == 2
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        bench.run(trainer.load())


def test_only_the_newest_checkpoints_stay(tiny_qwen3: Path, tmp_path: Path) -> None:
    """Named ones and incomplete ones are left alone."""
    config = CONFIG.model_copy(update={"engine": "local", "keep_checkpoints": 2})
    (tmp_path / "step-0").mkdir()

    async def scenario() -> None:
        trainer = await start_in_process_trainer(
            config, model_dir=tiny_qwen3, checkpoint_folder=tmp_path
        )
        await trainer.save("by-name")
        for _ in range(4):
            await trainer.train_step(GOOD, loss="grpo")
            await trainer.save()
        assert (await trainer.load()).step == 4
        await trainer.close()

    asyncio.run(scenario())
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"by-name", "step-0", "step-3", "step-4"}


def test_a_save_beside_training_holds_the_state_of_its_call(bench: Bench, tmp_path: Path) -> None:
    trainer = bench.trainer
    bench.run(trainer.train_step(GOOD, loss="grpo"))
    wanted = bench.run(trainer.forward(GOOD)).logprobs

    async def save_and_go_on() -> None:
        saved = await trainer.save(wait=False)
        assert (saved.complete, saved.step) == (False, 1)
        for _ in range(2):
            await trainer.train_step(GOOD, loss="grpo")

    bench.run(save_and_go_on())
    done = bench.run(trainer.wait_for_save())
    assert (done.complete, done.step, done.path) == (True, 1, str(tmp_path / "checkpoints/step-1"))
    assert bench.run(trainer.wait_for_save()) is None
    assert bench.run(trainer.load()).step == 1
    assert same_numbers(bench.run(trainer.forward(GOOD)).logprobs, wanted)


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """DCP writes a checkpoint, weights and all else, for every two releases."""
    may_write, write = threading.Semaphore(0), dcp.save

    def save(*args: Any, **kwargs: Any) -> Any:
        assert may_write.acquire(timeout=A_HANG_S)
        return write(*args, **kwargs)

    monkeypatch.setattr(dcp, "save", save)
    return may_write


def test_a_save_beside_training_is_seen_and_waited_for(
    bench: Bench, tmp_path: Path, may_write: threading.Semaphore
) -> None:
    """Status names it; a second save and a load wait for it; close lets it finish."""
    trainer, folder = bench.trainer, tmp_path / "checkpoints"

    async def scenario() -> None:
        first = await trainer.save("first", wait=False)
        await trainer.train_step(GOOD, loss="grpo")
        assert (await trainer.get_status()).saving == first.path
        second = asyncio.create_task(trainer.save("second", wait=False))
        await asyncio.sleep(0.05)
        assert not second.done()
        may_write.release(2)
        assert (await second).step == 1
        newest = asyncio.create_task(trainer.load())
        await asyncio.sleep(0.05)
        assert not newest.done()
        may_write.release(2)
        assert (await newest).step == 1
        await trainer.save("third", wait=False)
        closing = asyncio.create_task(trainer.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        may_write.release(2)
        await closing

    bench.run(scenario())
    assert {path.name for path in folder.iterdir()} == {"first", "second", "third"}
    assert all((path / "forge_trainer.json").is_file() for path in folder.iterdir())


def test_a_save_that_fails_beside_training_is_told_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = bench.trainer
    bench.run(trainer.save("before"))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "x")

    with monkeypatch.context() as patched:
        patched.setattr(dcp, "save", full)
        bench.run(trainer.save("lost", wait=False))
        assert bench.run(trainer.train_step(GOOD, loss="grpo")).optim.step == 1
        with pytest.raises(CheckpointError, match="cannot write .*lost: .*No space left"):
            bench.run(trainer.wait_for_save())
        bench.run(trainer.save("lost too", wait=False))
        with pytest.raises(CheckpointError, match="lost too: .*No space left"):
            bench.run(trainer.save("next"))
    assert bench.run(trainer.save("next")).complete
    assert bench.run(trainer.load(name="before")).step == 0


def test_what_cannot_be_saved_is_refused(bench: Bench) -> None:
    with pytest.raises(CheckpointError, match="wait=False is for 'dcp'"):
        bench.run(bench.trainer.save("x", format="hf", wait=False))
    with pytest.raises(CheckpointError, match="format is 'pt'"):
        bench.run(bench.trainer.save("x", format="pt"))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="name or path"):
        bench.run(bench.trainer.save("x", path="y"))


def test_a_full_disk_while_exporting_leaves_no_checkpoint(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the weights, and at the index, which is written last."""
    write_text = Path.write_text

    def full(path: Path, *args: Any) -> int:
        if path.name == "model.safetensors.index.json":
            raise OSError(28, "No space left on device", str(path))
        return write_text(path, *args)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(CheckpointError, match="No space left on device: .*index.json"):
        bench.run(bench.trainer.save("hf", format="hf"))
    assert not (tmp_path / "checkpoints" / "hf").exists()
    assert bench.run(bench.trainer.train_step(GOOD, loss="grpo")).optim.step == 1


def _noisy(logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
    """Draws from every generator that a loss may use."""
    noise_BT = torch.rand_like(logprobs_BT) + random.random() + float(np.random.rand())
    return LossOutput(total=-(noise_BT * logprobs_BT).sum())


def test_random_numbers_go_on_where_they_were(bench: Bench) -> None:
    trainer = bench.trainer

    def norms(number: int) -> list[float]:
        steps = [bench.run(trainer.train_step(GOOD, loss=_noisy)) for _ in range(number)]
        return [step.optim.grad_norm for step in steps]

    norms(1)
    bench.run(trainer.save(wait=False))
    straight = norms(2)
    bench.run(trainer.load())
    assert norms(2) == straight


def test_trainers_with_one_seed_draw_the_same(tiny_qwen3: Path, tmp_path: Path) -> None:
    async def norm(seed: int) -> float:
        trainer = await start_in_process_trainer(
            LOCAL.model_copy(update={"seed": seed}),
            model_dir=tiny_qwen3,
            checkpoint_folder=tmp_path,
        )
        result = await trainer.train_step(GOOD, loss=_noisy)
        await trainer.close()
        return result.optim.grad_norm

    first, second, other = (asyncio.run(norm(seed)) for seed in (1, 1, 2))
    assert first == second != other


def test_skipped_steps_are_counted_across_a_resume(tiny_qwen3: Path, tmp_path: Path) -> None:
    config = LOCAL.model_copy(update={"on_non_finite": "skip"})

    async def scenario() -> float:
        trainer = await start_in_process_trainer(
            config, model_dir=tiny_qwen3, checkpoint_folder=tmp_path
        )
        huge = [dataclasses.replace(s, advantages=[3e38] * len(s)) for s in GOOD]
        assert (await trainer.train_step(huge, loss="reinforce")).optim.skipped
        await trainer.save()
        await trainer.close()
        resumed = await start_in_process_trainer(
            config, model_dir=tiny_qwen3, checkpoint_folder=tmp_path
        )
        await resumed.load()
        result = await resumed.train_step(GOOD, loss="reinforce")
        await resumed.close()
        return float(result.optim.metrics["trainer/skipped_steps"].value)

    assert asyncio.run(scenario()) == 1.0


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_loaded(
    bench: Bench, tiny_llama: Path, tmp_path: Path
) -> None:
    """DCP reads the tensors that it is asked for, and does not mind others."""
    config = bench.trainer._setup.trainer

    async def save_other() -> str:
        other = await start_in_process_trainer(
            config, model_dir=tiny_llama, checkpoint_folder=tmp_path
        )
        saved = await other.save("other")
        await other.close()
        return saved.path

    path = bench.run(save_other())
    before = bench.run(bench.trainer.forward(GOOD)).logprobs
    for weights_only in (False, True):
        with pytest.raises(
            CheckpointError, match=r"is of another model: \d+ tensors differ, first"
        ):
            bench.run(bench.trainer.load(path=path, weights_only=weights_only))
    assert same_numbers(bench.run(bench.trainer.forward(GOOD)).logprobs, before)


def _trained(trainer: Any, steps: int) -> Any:
    async def train() -> None:
        for _ in range(steps):
            await trainer.train_step(GOOD, loss="grpo")

    return train()


def test_going_back_to_an_old_checkpoint_keeps_what_is_saved_after_that(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    """The highest step was kept, so that every checkpoint of the new branch was deleted at once."""
    config = LOCAL.model_copy(update={"keep_checkpoints": 1})

    async def scenario() -> None:
        trainer = await start_in_process_trainer(
            config, model_dir=tiny_qwen3, checkpoint_folder=tmp_path
        )
        await trainer.save("base")
        await _trained(trainer, 3)
        await trainer.save()
        await trainer.load(name="base")
        await _trained(trainer, 1)
        saved = await trainer.save()
        assert Path(saved.path).is_dir()
        assert (await trainer.load()).step == 1
        await trainer.close()

    asyncio.run(scenario())
    assert {path.name for path in tmp_path.iterdir()} == {"base", "step-1"}


def test_pruning_leaves_links_and_what_they_point_to(tiny_qwen3: Path, tmp_path: Path) -> None:
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    config = LOCAL.model_copy(update={"keep_checkpoints": 1})

    async def scenario() -> None:
        trainer = await start_in_process_trainer(
            config, model_dir=tiny_qwen3, checkpoint_folder=folder
        )
        for step in range(3):
            await trainer.save()
            if step == 0:
                (folder / "step-0").rename(archive)
                (folder / "step-0").symlink_to(archive)
            await _trained(trainer, 1)
        assert (await trainer.load(step=0)).step == 0
        await trainer.close()

    asyncio.run(scenario())
    assert {path.name for path in folder.iterdir()} == {"step-0", "step-2"}


def test_saving_deletes_no_folder_of_others(bench: Bench, tmp_path: Path) -> None:
    foreign = tmp_path / "run.partial"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    bench.run(bench.trainer.save(path=str(tmp_path / "run")))
    assert (foreign / "thesis.txt").read_text() == "mine"
    assert bench.run(bench.trainer.load(path=str(tmp_path / "run"))).step == 0


def test_a_failed_save_leaves_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each took disk space exactly when there was none."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(dcp, "save", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        bench.run(bench.trainer.save())
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_an_interrupted_save_has_left_goes_with_the_next(bench: Bench, tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".step-0.partial-0123abcd"
    left.mkdir(parents=True)
    bench.run(bench.trainer.save())
    assert not left.exists()


def test_a_changed_marker_is_noticed(bench: Bench) -> None:
    marker = Path(bench.run(bench.trainer.save()).path) / "forge_trainer.json"
    marker.write_text(marker.read_text().replace('"step": 0', '"step": 777'))
    with pytest.raises(CheckpointError, match="is damaged, its own hash differs"):
        bench.run(bench.trainer.load(step=0))


def test_kinds_of_checkpoints_have_names_of_their_own(bench: Bench, tmp_path: Path) -> None:
    trainer = bench.trainer
    for options in ({}, {"weights_only": True}, {"format": "hf"}):
        bench.run(trainer.save(**options))
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step-0", "weights-0", "hf-0"}
    assert bench.run(trainer.load()).path.endswith("step-0")
    newest_weights = bench.run(trainer.load(weights_only=True))
    assert newest_weights.path.endswith("weights-0")


@pytest.mark.parametrize(
    "where", [{"name": "../x"}, {"name": "a/b"}, {"name": ".x"}, {"name": ""}, {"path": "."}]
)
def test_names_that_are_not_one_folder_are_refused(bench: Bench, where: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="it must"):
        bench.run(bench.trainer.save(**where))


def test_an_export_can_be_exported_again(tiny_qwen3: Path, tmp_path: Path) -> None:
    """The marker of the first one was copied into the second, with a hash that did not fit."""

    async def export(model_dir: Path, name: str) -> Path:
        trainer = await start_in_process_trainer(
            LOCAL, model_dir=model_dir, checkpoint_folder=tmp_path
        )
        saved = await trainer.save(name, format="hf")
        await trainer.close()
        return Path(saved.path)

    first = asyncio.run(export(tiny_qwen3, "first"))
    second = asyncio.run(export(first, "second"))
    marker = read_marker(second)
    assert "forge_trainer.json" not in marker.xxh3_128
    verify_files(second, marker, marker.xxh3_128)


def test_random_state_goes_back_to_the_same_layout_only() -> None:
    """As many ranks in another layout: tensor-parallel ranks would draw different numbers."""
    layouts = [
        TrainerConfig.model_validate({"num_ranks": 2, "parallel": parallel}).layout
        for parallel in ({}, {"tensor": 2}, {"pipeline": 2}, {"data_replicate": 2})
    ]
    assert layouts == ["dp2x1 tp1 pp1", "dp1x1 tp2 pp1", "dp1x1 tp1 pp2", "dp1x2 tp1 pp1"]


@pytest.mark.parametrize("trainable", [True, False])
def test_a_profile_that_cannot_be_written_costs_no_step(
    tiny_qwen3: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, trainable: bool
) -> None:
    """The update was made and the handle did not know; a frozen trainer recorded for ever."""
    (tmp_path / "file").write_text("")
    profiling = ProfilingConfig(folder=str(tmp_path / "file"), trace_steps=[1])
    config = LOCAL.model_copy(update={"profiling": profiling, "trainable": trainable})

    async def scenario() -> None:
        trainer = await start_in_process_trainer(
            config, model_dir=tiny_qwen3, checkpoint_folder=tmp_path
        )
        await trainer.forward(GOOD)
        if trainable:
            assert (await trainer.train_step(GOOD, loss="grpo")).optim.step == 1
            assert (await trainer.push_weights()).version.policy_version == 1
        await trainer.close()

    asyncio.run(scenario())
    assert ("step 1 is not profiled" in caplog.text) == trainable
