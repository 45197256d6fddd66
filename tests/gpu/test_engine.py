"""The same engine on a GPU: flex attention, fused AdamW, NCCL; against float64 on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forge_trainer.config import (
    OptimizerConfig,
    PackingConfig,
    ProfilingConfig,
    TrainerConfig,
)
from forge_trainer.controller.batches import GPU_FLEX_BLOCK
from forge_trainer.engine.local import LocalEngine
from forge_trainer.engine.profiling import StepProfiler
from forge_trainer.engine.titan.engine import TitanEngine
from forge_trainer.errors import EngineError
from forge_trainer.functional.losses.objective import make_loss
from forge_trainer.functional.packing import PackingPlan, pack_sequences
from forge_trainer.functional.pieces.manifests import build_manifest
from forge_trainer.types import SaveRequest
from forge_trainer.weights.shared_memory.folder import shared_folder
from forge_trainer.weights.shared_memory.store import SharedMemoryWeightStore
from tests.data import random_sequences
from tests.unit.test_logprobs import require_unrounded_logits
from tests.weights import V0, published_by

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


@pytest.mark.parametrize("in_place", [False, True])
def test_pushed_weights_go_through_pinned_memory_on_a_stream_of_their_own(
    tiny_qwen3: Path, in_place: bool
) -> None:
    titan = TitanEngine(CONFIG.model_copy(update={"device": "cuda"}), tiny_qwen3)
    titan.setup()
    wanted = published_by(titan, torch.bfloat16)

    async def push() -> dict[str, torch.Tensor]:
        with shared_folder() as folder:
            store = SharedMemoryWeightStore(folder)
            pieces = titan.weight_pieces(dtype=torch.bfloat16)
            staged = store.stage(V0, 0, pieces, in_place=in_place)
            part = await store.write(staged)
            assert all(buffer.is_pinned() for buffer in store._copier._pinned)
            assert store._copier._stream != torch.cuda.current_stream()
            await store.commit(build_manifest(V0, store.transport, [part]))
            live = {name: torch.zeros_like(t, device="cuda") for name, t in wanted.items()}
            async with store.reading() as reading:
                await reading.load_into(live)
            store.close()
            return live

    found = asyncio.run(push())
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in wanted.items())


def _stepped(engine: TitanEngine) -> float:
    plan = PackingPlan(GPU_FLEX_BLOCK, 2, pad_multiple=GPU_FLEX_BLOCK)
    batches = pack_sequences(random_sequences(), dp_size=1, plan=plan).batches[0]
    engine.forward_backward(batches, make_loss("grpo"))
    return engine.optim_step().grad_norm


def _engine(model_dir: Path, **options: Any) -> TitanEngine:
    engine = TitanEngine(CONFIG.model_copy(update={"device": "cuda", **options}), model_dir)
    engine.setup()
    return engine


def test_moving_to_the_host_frees_the_gpu_and_changes_no_value(tiny_qwen3: Path) -> None:
    engine = _engine(tiny_qwen3)
    _stepped(engine)
    before = published_by(engine)
    held = torch.cuda.memory_allocated()
    engine.to("cpu")
    assert torch.cuda.memory_allocated() < held / 4
    with pytest.raises(EngineError, match=r"is on the CPU; call to\('cuda'\) first"):
        _stepped(engine)
    engine.to("cuda")
    after = published_by(engine)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    moved = _stepped(engine)
    engine.close()
    still = _engine(tiny_qwen3)
    _stepped(still)
    assert moved == pytest.approx(_stepped(still), rel=1e-5)


def test_a_save_beside_training_holds_the_state_of_its_call(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    engine = _engine(tiny_qwen3)
    _stepped(engine)
    wanted = published_by(engine)
    engine.save(SaveRequest(str(tmp_path / "saved"), wait=False))
    _stepped(engine)
    engine.wait_for_save()
    engine.load(str(tmp_path / "saved"))
    found = published_by(engine)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_allocations_of_chosen_steps_are_recorded(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfilingConfig(folder=str(tmp_path), memory_steps=[1]), rank=0)
    profiler.begin(1)
    torch.ones(1000, device="cuda")
    profiler.end()
    assert (tmp_path / "step-1-rank-0.memory.pickle").stat().st_size > 0


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs the extra float8")
def test_float8_products_are_close_to_float32(tiny_qwen3: Path) -> None:
    wanted = _stepped(_engine(tiny_qwen3))
    dist.destroy_process_group()
    found = _stepped(_engine(tiny_qwen3, float8="rowwise", compute_dtype="bfloat16"))
    assert found == pytest.approx(wanted, rel=0.1)


def test_logits_of_bfloat16_come_out_in_float32() -> None:
    require_unrounded_logits("cuda")
