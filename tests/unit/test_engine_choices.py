"""Engines by name, frozen ones, and where and in which mode an engine's tensors are."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from forge_trainer.controller.in_process import start_in_process_trainer
from forge_trainer.engine.residence import Residence
from forge_trainer.errors import EngineError
from tests.data import same_numbers
from tests.unit.conftest import CONFIG, GOOD, Bench


def test_an_engine_can_be_named_by_where_it_is(tiny_qwen3: Path, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"engine": "tests.engines:TaggedEngine"})

    async def scenario() -> None:
        trainer = await start_in_process_trainer(
            config, model_dir=tiny_qwen3, checkpoint_folder=tmp_path
        )
        assert (await trainer.get_config()).model_type == "tagged"
        assert (await trainer.train_step(GOOD, loss="grpo")).optim.step == 1
        await trainer.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("engine", ["titan", "local"])
def test_a_frozen_trainer_can_only_do_forward(
    tiny_qwen3: Path, tmp_path: Path, engine: str
) -> None:
    """It gives the log-probs of a trainer that has not moved, and keeps no optimizer state."""

    async def scenario() -> None:
        trained, frozen = [
            await start_in_process_trainer(
                CONFIG.model_copy(update={"engine": engine, "trainable": trainable}),
                model_dir=tiny_qwen3,
                checkpoint_folder=tmp_path,
            )
            for trainable in (True, False)
        ]
        wanted = (await trained.forward(GOOD)).logprobs
        await trained.save("weights", weights_only=True)
        assert same_numbers((await frozen.forward(GOOD)).logprobs, wanted)
        for refused in (
            frozen.forward_backward(GOOD, loss="grpo"),
            frozen.optim_step(),
            frozen.save("full"),
            frozen.load(name="weights"),
        ):
            with pytest.raises(EngineError, match="this trainer is frozen"):
                await refused
        ranks: Any = frozen._ranks
        assert not any(p.requires_grad for p in ranks._worker._engine._model.parameters())
        await trained.train_step(GOOD, loss="grpo")
        await trained.save("moved", weights_only=True)
        await frozen.load(name="moved", weights_only=True)
        now = (await trained.forward(GOOD)).logprobs
        assert same_numbers((await frozen.forward(GOOD)).logprobs, now)
        await frozen.close()
        await trained.close()

    asyncio.run(scenario())


def test_moving_changes_no_value(bench: Bench) -> None:
    """On a machine without a GPU, "cpu" is home."""
    trainer = bench.trainer
    bench.run(trainer.train_step(GOOD, loss="grpo"))
    bench.run(trainer.save())
    wanted = bench.run(trainer.train_step(GOOD, loss="grpo")).optim.grad_norm
    bench.run(trainer.load())
    bench.run(trainer.to("cpu"))
    assert bench.run(trainer.train_step(GOOD, loss="grpo")).optim.grad_norm == wanted
    with pytest.raises(EngineError, match="cannot move to cuda: this trainer runs on cpu"):
        bench.run(trainer.to("cuda"))


def test_what_is_away_cannot_be_used() -> None:
    """A device that all machines have stands in for a GPU."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    home = Residence(model, [optimizer], torch.device("meta"))
    home.require_home()
    home.move("meta")
    assert {t.device.type for t in _tensors(model, optimizer)} == {"meta"}
    away = Residence(model, [optimizer], torch.device("cuda"))
    away._is_home = False
    with pytest.raises(EngineError, match=r"is on the CPU; call to\('cuda'\) first"):
        away.require_home()


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [v for s in optimizer.state.values() for k, v in s.items() if k != "step"]
    return [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)] + [
        state for state in states if isinstance(state, torch.Tensor)
    ]


def test_dropout_is_off_until_it_is_asked_for(tiny_llama: Path, tmp_path: Path) -> None:
    """With it, the ratio to the generator's log-probs would be noise."""
    model_dir = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    file = model_dir / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_dropout": 0.5}))

    async def scenario() -> None:
        trainer = await start_in_process_trainer(
            CONFIG.model_copy(update={"engine": "local"}),
            model_dir=model_dir,
            checkpoint_folder=tmp_path,
        )

        async def logprobs() -> list[NDArray[np.float32]]:
            return (await trainer.forward(GOOD)).logprobs

        first = await logprobs()
        assert same_numbers(await logprobs(), first)
        await trainer.train_mode()
        assert not same_numbers(await logprobs(), await logprobs())
        await trainer.eval_mode()
        assert same_numbers(await logprobs(), first)
        await trainer.close()

    asyncio.run(scenario())
