"""Checkpoints of several ranks: written beside training, and continued from in new processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_trainer.config import LRScheduleConfig, OptimizerConfig, TrainerConfig
from forge_trainer.errors import CheckpointError
from forge_trainer.functional.packing import PackingPlan, pack_sequences
from forge_trainer.metrics import metric_values
from forge_trainer.types import LossOutput, SaveRequest, TrainBatch, World
from tests.data import random_sequences
from tests.ranks import RankPool

CONFIG = TrainerConfig(
    num_ranks=2,
    device="cpu",
    seed=3,
    on_non_finite="skip",
    optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1),
    lr_schedule=LRScheduleConfig(warmup_steps=3, decay_steps=2, total_steps=6),
)
STEPS, SAVED_AFTER = 5, 2


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def _noisy(logprobs_BT: Tensor, batch: TrainBatch) -> LossOutput:
    """Drops half of the tokens at random, so that random state decides the gradient."""
    kept_BT = torch.rand_like(logprobs_BT) < 0.5
    return LossOutput(total=-(kept_BT * batch.loss_mask_BT * logprobs_BT).sum())


def _engine(rank: int, model_dir: Path) -> Any:
    from forge_trainer.engine.titan.engine import TitanEngine

    engine = TitanEngine(CONFIG, model_dir, World(rank, rank, CONFIG.num_ranks))
    engine.setup()
    return engine


def _step(engine: Any, seed: int) -> dict[str, float]:
    """One update; all its numbers. The third gradient is infinite, and skipped."""
    packed = pack_sequences(random_sequences(seed=seed), dp_size=2, plan=PackingPlan(48, 2))
    batches = packed.batches[engine.facts().dp_rank]
    if seed == SAVED_AFTER - 1:
        huge = [torch.full_like(batch.token_ids_BT, 3e38, dtype=torch.float32) for batch in batches]
        batches = [
            dataclasses.replace(batch, advantages_BT=advantages)
            for batch, advantages in zip(batches, huge, strict=True)
        ]
        _forward_backward(engine, batches, "reinforce")
    else:
        _forward_backward(engine, batches, _noisy)
    result = engine.optim_step()
    values = {"norm": result.grad_norm, "rate": result.learning_rate, "step": float(result.step)}
    return values | metric_values(result.metrics)


def _forward_backward(engine: Any, batches: list[TrainBatch], loss: Any) -> None:
    from forge_trainer.functional.losses.objective import make_loss

    engine.forward_backward(batches, make_loss(loss))


def _tensors(engine: Any) -> dict[str, Tensor]:
    """This rank's parameters and optimizer state."""
    state = {**engine._model.state_dict(), **engine._optimizers.state_dict()}
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).clone()
        for name, value in tensors.items()
    }


def _straight(rank: int, model_dir: Path, saved: str) -> Any:
    """All steps; a checkpoint on the way is written beside them."""
    engine = _engine(rank, model_dir)
    rows = []
    for seed in range(STEPS):
        if seed == SAVED_AFTER:
            assert not engine.save(SaveRequest(saved, wait=False)).complete
        rows.append(_step(engine, seed))
    assert engine.wait_for_save().complete
    tensors = _tensors(engine)
    engine.close()
    return rows, tensors


def _resumed(rank: int, model_dir: Path, saved: str) -> Any:
    engine = _engine(rank, model_dir)
    assert engine.load(saved).step == SAVED_AFTER - 1
    rows = [_step(engine, seed) for seed in range(SAVED_AFTER, STEPS)]
    tensors = _tensors(engine)
    engine.close()
    return rows, tensors


def test_new_processes_go_on_bit_for_bit(pool: RankPool, tiny_qwen3: Path, tmp_path: Path) -> None:
    """Parameters, optimizer state, schedule, random draws and counters, on every rank."""
    saved = str(tmp_path / "saved")
    straight = pool.run(2, _straight, tiny_qwen3, saved)
    with RankPool(2) as new_processes:
        resumed = new_processes.run(2, _resumed, tiny_qwen3, saved)
    for (rows, tensors), (wanted_rows, wanted) in zip(resumed, straight, strict=True):
        assert rows == wanted_rows[SAVED_AFTER:]
        assert rows[-1]["trainer/skipped_steps"] == 1.0
        assert tensors.keys() == wanted.keys()
        assert any("exp_avg_sq" in name for name in tensors)
        assert all(torch.equal(tensors[name], tensor) for name, tensor in wanted.items())


def _save_and_overwrite(rank: int, model_dir: Path, saved: str) -> bool:
    """True if what was saved is the state at the call, though all of it was overwritten at once."""
    engine = _engine(rank, model_dir)
    _step(engine, 0)
    before = _tensors(engine)
    engine.save(SaveRequest(saved, wait=False))
    with torch.no_grad():
        for state in (engine._model.state_dict(), engine._optimizers.state_dict()):
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
    for _ in range(50):
        dist.all_reduce(torch.ones(1000))
    engine.load(saved)
    after = _tensors(engine)
    engine.close()
    return all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_checkpoint_holds_the_state_at_the_call(
    pool: RankPool, tiny_qwen3: Path, tmp_path: Path
) -> None:
    assert all(pool.run(2, _save_and_overwrite, tiny_qwen3, str(tmp_path / "saved")))


def _save_with_failing(
    rank: int, model_dir: Path, folder: Path, where: str, error: BaseException
) -> str:
    """What a save beside training says if `where` fails on rank 1; the next one works."""
    engine = _engine(rank, model_dir)
    failing = patch(where, side_effect=error) if rank == 1 else nullcontext()

    def save_beside_a_step() -> None:
        engine.save(SaveRequest(str(folder / "lost"), wait=False))
        _step(engine, 0)
        engine.wait_for_save()

    with failing, pytest.raises(CheckpointError) as caught:
        save_beside_a_step()
    engine.save(SaveRequest(str(folder / "kept"), wait=False))
    assert engine.wait_for_save().complete
    engine.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        (
            "torch.distributed.checkpoint.FileSystemWriter.write_data",
            OSError(28, "No space left on device"),
        ),
        ("forge_trainer.engine.checkpoint.staging.Staging.copy", MemoryError("no room for a copy")),
    ],
    ids=["disk", "memory"],
)
def test_what_is_full_on_one_rank_is_an_error_on_all(
    pool: RankPool, tiny_qwen3: Path, tmp_path: Path, where: str, error: BaseException
) -> None:
    """Without memory for its copy one rank gave up, and no later save of the others succeeded."""
    messages = pool.run(2, _save_with_failing, tiny_qwen3, tmp_path, where, error)
    assert all(str(error.args[-1]) in message for message in messages)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
