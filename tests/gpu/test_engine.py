"""The same engine on a GPU: flex attention, fused AdamW, NCCL; against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forge_trainer.config.trainer import OptimizerConfig, PackingConfig, TrainerConfig
from forge_trainer.engine.local import LocalEngine
from forge_trainer.engine.titan.engine import TitanEngine
from forge_trainer.functional.objective import make_loss
from forge_trainer.functional.packing import PackingPlan, pack_sequences
from forge_trainer.runtime.batches import GPU_FLEX_BLOCK
from tests.data import random_sequences

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = TrainerConfig(
    optimizer=OptimizerConfig(lr=1e-2, eps=1e-2),
    packing=PackingConfig(max_row_tokens=GPU_FLEX_BLOCK, rows_per_microbatch=2),
)


@pytest.fixture(autouse=True)
def _leave_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_five_steps_equal_the_slow_obvious_engine(tiny_qwen3: Path) -> None:
    local = LocalEngine(
        CONFIG.model_copy(update={"engine": "local", "device": "cpu"}),
        tiny_qwen3,
        dtype=torch.float64,
    )
    titan = TitanEngine(CONFIG.model_copy(update={"device": "cuda"}), tiny_qwen3)
    local.setup()
    titan.setup()
    assert titan.facts().device.startswith("cuda")
    plan = PackingPlan(GPU_FLEX_BLOCK, 2, pad_multiple=GPU_FLEX_BLOCK)
    for seed in range(5):
        batches = pack_sequences(random_sequences(seed=seed), dp_size=1, plan=plan).batches[0]
        wanted = local.forward_backward(batches, make_loss("grpo"))
        found = titan.forward_backward(batches, make_loss("grpo"))
        assert found.loss_sum == pytest.approx(wanted.loss_sum, rel=1e-4)
        wanted_norm, found_norm = local.optim_step().grad_norm, titan.optim_step().grad_norm
        assert found_norm == pytest.approx(wanted_norm, rel=1e-4)


def test_pushed_pieces_are_host_copies(tiny_qwen3: Path) -> None:
    titan = TitanEngine(CONFIG.model_copy(update={"device": "cuda"}), tiny_qwen3)
    titan.setup()
    pieces = list(titan.weight_pieces(dtype=torch.bfloat16))
    assert {(piece.data.device.type, piece.data.dtype) for piece in pieces} == {
        ("cpu", torch.bfloat16)
    }
