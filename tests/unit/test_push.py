"""Pushes beside other calls: what they publish, what waits for them, and how they fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_trainer.config import GeneratorConfig, WeightsConfig
from forge_trainer.controller.checks import check_dtypes
from forge_trainer.controller.in_process import start_in_process_trainer
from forge_trainer.controller.ranks import OpenStore
from forge_trainer.controller.trainer import TrainerHandle
from forge_trainer.errors import ConfigError, EngineError, WeightsError
from forge_trainer.functional.pieces.manifests import piece_checksum
from forge_trainer.pieces import Manifest, RankPieces, StagedPieces, WeightsVersion
from forge_trainer.protocols import WeightStore
from forge_trainer.types import OptimParams
from forge_trainer.weights import staging
from forge_trainer.weights.memory import MemoryWeightStore
from tests.unit.conftest import CONFIG, GOOD
from tests.waiting import A_HANG_S, Gate
from tests.weights import V0, V1, read_all


class SlowStore(MemoryWeightStore):
    """Writes when it is let; or fails to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.error: Exception | None = None

    async def write(self, staged: StagedPieces) -> RankPieces:
        await self.may_write.wait()
        if self.error is not None:
            raise self.error
        return await super().write(staged)


@contextlib.asynccontextmanager
async def _trainer(
    model_dir: Path, folder: Path, stage: str
) -> AsyncIterator[tuple[TrainerHandle, SlowStore]]:
    store = SlowStore()
    trainer = await start_in_process_trainer(
        CONFIG.model_copy(update={"engine": "local"}),
        model_dir=model_dir,
        checkpoint_folder=folder,
        weights=WeightsConfig.model_validate({"stage": stage}),
        store=store,
    )
    try:
        yield trainer, store
    finally:
        store.may_write.set()
        await trainer.close()


Scenario = Callable[[TrainerHandle, SlowStore], Awaitable[None]]


@pytest.fixture(params=["copy", "in_place"])
def stage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _run(scenario: Scenario, model_dir: Path, folder: Path, stage: str) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(A_HANG_S),
            _trainer(model_dir, folder, stage) as (trainer, store),
        ):
            await scenario(trainer, store)

    asyncio.run(main())


async def _require_done(task: asyncio.Task[Any], *, is_done: bool) -> None:
    """The task ends before anything else happens; or it waits."""
    if is_done:
        await asyncio.wait([task])
        return
    # Of something that never comes, a short look says as much as a long one.
    await asyncio.sleep(0.05)
    assert not task.done()


def test_checksums_are_taken_once_the_engine_is_free(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took three times as long as the copy, and the next step waited for them."""
    gate = Gate()

    def slow_checksum(*args: Any) -> bytes:
        gate.pass_through()
        return piece_checksum(*args)

    monkeypatch.setattr(staging, "piece_checksum", slow_checksum)

    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        ref = await trainer.push_weights(wait=False)
        await gate.reached()
        await trainer.train_step(GOOD, loss="grpo")
        assert await store.versions() == []
        gate.open()
        assert await trainer.wait_for_push() == ref
        await read_all(store, ref.version)

    _run(scenario, tiny_qwen3, tmp_path, "copy")


def test_a_version_is_that_of_the_push_whatever_comes_next(
    tiny_qwen3: Path, tmp_path: Path, stage: str
) -> None:
    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        await trainer.push_weights()
        _, before = await read_all(store)
        await trainer.train_step(GOOD, loss="grpo")
        await trainer.save("one")
        await trainer.push_weights()
        _, wanted = await read_all(store)
        await trainer.load(name="one")
        store.may_write.clear()
        ref = await trainer.push_weights(wait=False)
        assert ref.version == WeightsVersion(1, 1)
        assert ref.num_tensors == len(wanted)
        assert (await trainer.get_status()).is_pushing
        assert await store.versions() == [V0, V1]
        # Whatever needs no change of parameters goes on.
        await trainer.forward_backward(GOOD, loss="grpo")
        updating = asyncio.create_task(trainer.optim_step(params=OptimParams(lr=1.0)))
        await _require_done(updating, is_done=stage == "copy")
        store.may_write.set()
        await updating
        assert await trainer.wait_for_push() == ref
        assert not (await trainer.get_status()).is_pushing
        _, found = await read_all(store, ref.version)
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
        assert not all(torch.equal(found[name], tensor) for name, tensor in before.items())

    _run(scenario, tiny_qwen3, tmp_path, stage)


@pytest.mark.parametrize("change", ["load", "to"])
def test_nothing_changes_weights_that_are_being_read(
    tiny_qwen3: Path, tmp_path: Path, stage: str, change: str
) -> None:
    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        await trainer.save("start")
        await trainer.train_step(GOOD, loss="grpo")
        store.may_write.clear()
        await trainer.push_weights(wait=False)
        changing = asyncio.create_task(
            trainer.load(name="start") if change == "load" else trainer.to("cpu")
        )
        await _require_done(changing, is_done=stage == "copy")
        store.may_write.set()
        await changing
        assert (await trainer.wait_for_push()) is not None

    _run(scenario, tiny_qwen3, tmp_path, stage)


def test_a_push_that_fails_is_told_at_the_next_call_and_once(
    tiny_qwen3: Path, tmp_path: Path, stage: str
) -> None:
    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        first = await trainer.push_weights()
        await trainer.train_step(GOOD, loss="grpo")
        pieces = store._pieces.keys()
        store.error = WeightsError("no room")
        await trainer.push_weights(wait=False)
        while (await trainer.get_status()).is_pushing:
            await asyncio.sleep(0.001)
        with pytest.raises(WeightsError, match="no room"):
            await trainer.train_step(GOOD, loss="grpo")
        status = await trainer.get_status()
        assert (status.step, status.accumulated_tokens) == (1, 0)
        assert (status.published, status.held) == (first.version, [first.version])
        assert store._pieces.keys() == pieces
        assert await trainer.wait_for_push() is None
        await trainer.clear_gradients()
        store.error = None
        assert (await trainer.push_weights()).version == V1

    _run(scenario, tiny_qwen3, tmp_path, stage)


def test_an_update_is_not_made_when_its_weights_could_not_be_read(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    """In place, a push may fail while a train_step runs: the gradient goes, the weights stay."""

    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        store.may_write.clear()
        await trainer.push_weights(wait=False)
        stepping = asyncio.create_task(trainer.train_step(GOOD, loss="grpo"))
        while (await trainer.get_status()).accumulated_tokens == 0:
            await asyncio.sleep(0.001)
        store.error = WeightsError("no room")
        store.may_write.set()
        with pytest.raises(WeightsError, match="no room"):
            await stepping
        status = await trainer.get_status()
        assert (status.step, status.accumulated_tokens) == (0, 0)
        await trainer.train_step(GOOD, loss="grpo")

    _run(scenario, tiny_qwen3, tmp_path, "in_place")


def test_the_next_push_waits_for_the_last(tiny_qwen3: Path, tmp_path: Path) -> None:
    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        store.may_write.clear()
        await trainer.push_weights(wait=False)
        await trainer.train_step(GOOD, loss="grpo")
        second = asyncio.create_task(trainer.push_weights())
        await _require_done(second, is_done=False)
        store.may_write.set()
        await second
        assert await store.versions() == [V0, V1]

    _run(scenario, tiny_qwen3, tmp_path, "copy")


def test_a_failure_is_told_by_close_if_by_nobody_else(tiny_qwen3: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with _trainer(tiny_qwen3, tmp_path, "copy") as (trainer, store):
            store.error = WeightsError("no room")
            await trainer.push_weights(wait=False)
            with pytest.raises(WeightsError, match="no room"):
                await trainer.close()

    asyncio.run(main())


def test_a_waiter_that_gives_up_leaves_the_news_to_others(tiny_qwen3: Path, tmp_path: Path) -> None:
    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        store.may_write.clear()
        ref = await trainer.push_weights(wait=False)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(trainer.wait_for_push(), 0.01)
        store.may_write.set()
        while (await trainer.get_status()).is_pushing:
            await asyncio.sleep(0.001)
        # A call in between is no answer.
        await trainer.clear_gradients()
        assert await trainer.wait_for_push() == ref

    _run(scenario, tiny_qwen3, tmp_path, "copy")


def test_a_commit_whose_answer_is_lost_leaves_no_version_without_pieces(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        await trainer.push_weights()
        await trainer.train_step(GOOD, loss="grpo")
        commit = store.commit

        async def lost(manifest: Manifest) -> None:
            await commit(manifest)
            raise OSError("connection lost")

        with monkeypatch.context() as patched:
            patched.setattr(store, "commit", lost)
            with pytest.raises(OSError, match="connection lost"):
                await trainer.push_weights()
        assert await store.versions() == [V0]
        await read_all(store)
        assert (await trainer.push_weights()).version == V1
        await read_all(store, V1)

    _run(scenario, tiny_qwen3, tmp_path, "copy")


def test_a_version_that_cannot_be_dropped_does_not_keep_others(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        drop = store.drop

        async def stuck(version: WeightsVersion) -> bool:
            if version == V0:
                raise OSError("stuck")
            return await drop(version)

        monkeypatch.setattr(store, "drop", stuck)
        for _ in range(5):
            await trainer.push_weights()
            await trainer.train_step(GOOD, loss="grpo")
        await trainer.push_weights()
        await trainer._publisher._retention.settle()
        assert [v.policy_version for v in await store.versions()] == [0, 4, 5]

    _run(scenario, tiny_qwen3, tmp_path, "copy")


def test_a_version_goes_once_its_last_reader_is_done(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not there is another push, or an attempt failed."""

    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        looks = 0
        drop = store.drop

        async def flaky(version: WeightsVersion) -> bool:
            nonlocal looks
            looks += 1
            if looks == 3:
                raise OSError("once")
            return await drop(version)

        monkeypatch.setattr(store, "drop", flaky)
        trainer._publisher._retention._look_again_s = 0.001
        await trainer.push_weights()
        async with store.reading(V0) as reading:
            for _ in range(3):
                await trainer.train_step(GOOD, loss="grpo")
                await trainer.push_weights()
            while looks < 6:
                await asyncio.sleep(0.001)
            await reading.read("model.norm.weight")
            held = await store.versions()
            assert [v.policy_version for v in held] == [2, 3]
            assert len(store._pieces) == 3
        while len(store._pieces) == 3:
            await asyncio.sleep(0.001)
        assert await store.versions() == held

    _run(scenario, tiny_qwen3, tmp_path, "copy")


def test_a_store_that_hangs_is_given_up(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        async def hang(manifest: Manifest) -> None:
            await asyncio.Event().wait()

        trainer._publisher._store_timeout_s = 0.05
        with monkeypatch.context() as patched:
            patched.setattr(store, "commit", hang)
            with pytest.raises(WeightsError, match="weight store did not publish a version within"):
                await trainer.push_weights()
        assert (await trainer.push_weights()).version == V0

    _run(scenario, tiny_qwen3, tmp_path, "copy")


def _restart(trainer: TrainerHandle, new: WeightStore) -> OpenStore:
    async def restart() -> WeightStore:
        trainer._publisher._ranks._worker.use_store(new)  # type: ignore[attr-defined]
        return new

    return restart


def test_a_replaced_store_gets_only_whole_versions(tiny_qwen3: Path, tmp_path: Path) -> None:
    """Though a push to the old one has begun when it is replaced, and others wait behind."""

    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        new = MemoryWeightStore()
        store.may_write.clear()
        pushing = asyncio.create_task(trainer.push_weights(wait=False))
        replacing = asyncio.create_task(trainer.replace_store(_restart(trainer, new)))
        stepping = asyncio.create_task(trainer.train_step(GOOD, loss="grpo"))
        await asyncio.sleep(0)
        store.may_write.set()
        _, ref, _ = await asyncio.gather(pushing, replacing, stepping)
        assert ref.version == WeightsVersion(1, 0)
        assert await new.versions() == [ref.version]
        await read_all(new, ref.version)

    _run(scenario, tiny_qwen3, tmp_path, "copy")


@pytest.mark.parametrize("error", [WeightsError("lost"), OSError("lost"), EngineError("no memory")])
@pytest.mark.parametrize("when", ["before", "while waiting for a turn"])
def test_a_store_is_replaced_whatever_became_of_the_last_push(
    tiny_qwen3: Path, tmp_path: Path, error: Exception, when: str
) -> None:
    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        new = MemoryWeightStore()
        store.error = error
        store.may_write.clear()
        await trainer.push_weights(wait=False)
        if when == "before":
            store.may_write.set()
            while (await trainer.get_status()).is_pushing:
                await asyncio.sleep(0.001)
            ref = await trainer.replace_store(_restart(trainer, new))
        else:
            stepping = asyncio.create_task(trainer.eval_mode())
            await asyncio.sleep(0)
            replacing = asyncio.create_task(trainer.replace_store(_restart(trainer, new)))
            await asyncio.sleep(0)
            store.may_write.set()
            await stepping
            ref = await replacing
        assert await new.versions() == [ref.version]
        await trainer.train_step(GOOD, loss="grpo")

    _run(scenario, tiny_qwen3, tmp_path, "copy")


def test_a_store_that_cannot_be_replaced_goes_on(tiny_qwen3: Path, tmp_path: Path) -> None:
    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        async def restart() -> WeightStore:
            raise ConfigError("cannot be had")

        trainer._publisher._retention._look_again_s = 0.001
        await trainer.push_weights()
        async with store.reading(V0):
            for _ in range(2):
                await trainer.train_step(GOOD, loss="grpo")
                await trainer.push_weights()
            with pytest.raises(ConfigError, match="cannot be had"):
                await trainer.replace_store(restart)
        while len(store._pieces) > 2:
            await asyncio.sleep(0.001)
        await trainer.train_step(GOOD, loss="grpo")
        assert (await trainer.push_weights()).version == WeightsVersion(0, 3)

    _run(scenario, tiny_qwen3, tmp_path, "copy")


def test_a_new_store_that_fails_leaves_nothing_published(tiny_qwen3: Path, tmp_path: Path) -> None:
    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        await trainer.push_weights()
        failing = SlowStore()
        failing.error = WeightsError("lost again")
        with pytest.raises(WeightsError, match="lost again"):
            await trainer.replace_store(_restart(trainer, failing))
        status = await trainer.get_status()
        assert (status.published, status.held, status.push) == (None, [], None)
        ref = await trainer.replace_store(_restart(trainer, MemoryWeightStore()))
        assert (await trainer.get_status()).held == [ref.version] == [WeightsVersion(2, 0)]

    _run(scenario, tiny_qwen3, tmp_path, "copy")


def test_a_write_that_hangs_ends_the_push_and_not_the_trainer(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        worker = trainer._publisher._ranks._worker  # type: ignore[attr-defined]
        short = worker._config.model_copy(update={"checkpoint_timeout_s": 0.05})
        store.may_write.clear()
        with monkeypatch.context() as patched:
            patched.setattr(worker, "_config", short)
            for _ in range(2):
                with pytest.raises(WeightsError, match="did not write its weights within"):
                    await trainer.push_weights()
        await trainer.train_step(GOOD, loss="grpo")
        # A new store does not wait for what the old one still writes.
        ref = await trainer.replace_store(_restart(trainer, MemoryWeightStore()))
        assert ref.version == WeightsVersion(1, 1)

    _run(scenario, tiny_qwen3, tmp_path, "copy")


@pytest.mark.parametrize("failure", ["hangs", "fails"])
def test_status_does_not_need_the_store(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        async def num_readers() -> int:
            if failure == "hangs":
                await asyncio.Event().wait()
            raise OSError("too many open files")

        monkeypatch.setattr("forge_trainer.controller.publishing.STATUS_TIMEOUT_S", 0.01)
        monkeypatch.setattr(store, "num_readers", num_readers)
        assert (await trainer.get_status()).num_readers == 0

    _run(scenario, tiny_qwen3, tmp_path, "copy")


def test_closing_waits_for_a_push(tiny_qwen3: Path, tmp_path: Path, stage: str) -> None:
    kept: list[Any] = []

    async def scenario(trainer: TrainerHandle, store: SlowStore) -> None:
        store.may_write.clear()
        await trainer.push_weights(wait=False)
        closing = asyncio.create_task(trainer.close())
        await _require_done(closing, is_done=False)
        store.may_write.set()
        await closing
        kept.extend(await store.versions())

    _run(scenario, tiny_qwen3, tmp_path, stage)
    assert kept == [V0]


def test_a_generator_must_run_in_what_is_published() -> None:
    check_dtypes(WeightsConfig(), GeneratorConfig())
    check_dtypes(WeightsConfig(dtype="bfloat16"), GeneratorConfig(dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"generator.dtype: bfloat16, but weights.dtype is float"):
        check_dtypes(WeightsConfig(), GeneratorConfig(dtype="bfloat16"))
