"""A first hour on several GPUs: NCCL, placement, weights out of and into device memory, faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forge_trainer.config import (
    GeneratorConfig,
    OptimizerConfig,
    PackingConfig,
    PlacementConfig,
    TrainerConfig,
    WeightsConfig,
)
from forge_trainer.controller.batches import GPU_FLEX_BLOCK
from forge_trainer.controller.in_process import start_in_process_trainer
from forge_trainer.errors import WorkerLostError
from forge_trainer.hf import load_weights
from forge_trainer.processes.lifecycle import Services, Site, running_services
from forge_trainer.types import LossOutput, TrainBatch, TrainStepResult
from tests.data import random_sequences

RANKS = 2
NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < RANKS, reason=f"needs {RANKS} CUDA devices"),
]
TRAINER = TrainerConfig(
    num_ranks=RANKS,
    device="cuda",
    optimizer=OptimizerConfig(lr=1e-2, eps=1e-2),
    packing=PackingConfig(max_row_tokens=GPU_FLEX_BLOCK, rows_per_microbatch=2),
)
# With a third GPU, the generator has one of its own.
PLACEMENT = PlacementConfig(colocate=[] if NUM_GPUS > RANKS else ["trainer", "generator"])


def _with_services(
    work: Callable[[Services], object],
    model_dir: Path,
    folder: Path,
    trainer: TrainerConfig = TRAINER,
    weights: WeightsConfig | None = None,
) -> None:
    async def scenario() -> None:
        async with running_services(
            trainer,
            GeneratorConfig(device="cuda", max_prompt_tokens=16),
            weights or WeightsConfig(),
            model_dir=model_dir,
            checkpoint_folder=folder,
            site=Site(placement=PLACEMENT),
        ) as services:
            await work(services)  # type: ignore[misc]

    asyncio.run(scenario())


def _loss(result: TrainStepResult) -> float:
    """Per token."""
    return result.forward_backward.metrics["loss/mean"].value


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param  # type: ignore[no-any-return]


def test_two_ranks_over_nccl_train_like_one_process(
    tiny_qwen3: Path, tmp_path: Path, dtype: str
) -> None:
    """Five steps of different lengths; bfloat16 to what its eight bits of precision allow."""
    calls = [random_sequences(seed=step) for step in range(5)]
    wanted: list[tuple[float, float]] = []

    async def slow_obvious_version() -> None:
        config = TRAINER.model_copy(update={"num_ranks": 1, "device": "cpu", "engine": "local"})
        trainer = await start_in_process_trainer(
            config, model_dir=tiny_qwen3, checkpoint_folder=tmp_path
        )
        for sequences in calls:
            result = await trainer.train_step(sequences, loss="grpo")
            wanted.append((_loss(result), result.optim.grad_norm))
        await trainer.close()

    async def on_gpus(services: Services) -> None:
        facts = await services.trainer.get_config()
        assert [rank.device for rank in facts.ranks] == ["cuda:0", "cuda:1"]
        tolerance = 1e-4 if dtype == "float32" else 5e-2
        for sequences, (loss, norm) in zip(calls, wanted, strict=True):
            result = await services.trainer.train_step(sequences, loss="grpo")
            assert _loss(result) == pytest.approx(loss, rel=tolerance, abs=tolerance)
            assert result.optim.grad_norm == pytest.approx(norm, rel=tolerance)

    asyncio.run(slow_obvious_version())
    trainer = TRAINER.model_copy(update={"compute_dtype": dtype})
    _with_services(on_gpus, tiny_qwen3, tmp_path, trainer)


def test_meshes_see_their_own_devices(tiny_qwen3: Path, tmp_path: Path) -> None:
    async def look(services: Services) -> None:
        facts = await services.trainer.get_config()
        assert {rank.visible_devices for rank in facts.ranks} == {"0,1"}
        # The controller itself has opened none.
        assert not torch.cuda.is_initialized()

    _with_services(look, tiny_qwen3, tmp_path)


@pytest.mark.parametrize("transport", ["shared_memory", "torchstore"])
def test_weights_go_from_device_to_device_and_into_files(
    tiny_qwen3: Path, tmp_path: Path, transport: str
) -> None:
    found: dict[str, Tensor] = {}

    async def train_push_pull_export(services: Services) -> None:
        await services.trainer.train_step(random_sequences(), loss="grpo")
        ref = await services.trainer.push_weights()
        assert await services.generator.pull_weights(ref) == ref.version
        held = await services.generator.weight_checksums()
        for name in held.tensors:
            found[name] = await services.generator.read_weight(name)
        await services.trainer.save(path=str(tmp_path / "export"), format="hf")

    weights = WeightsConfig.model_validate({"transport": transport})
    _with_services(train_push_pull_export, tiny_qwen3, tmp_path, weights=weights)
    exported = load_weights(tmp_path / "export")
    for name, tensor in found.items():
        assert torch.equal(tensor, exported[name]), name


class OutOfMemoryOnOneRank:
    """A loss whose backward pass asks the second GPU for more than there is."""

    def __call__(self, logprobs_BT: Tensor, batch: TrainBatch) -> LossOutput:
        if logprobs_BT.device.index == 1:
            logprobs_BT.register_hook(self._ask_for_too_much)
        return LossOutput((logprobs_BT * batch.loss_mask_BT).sum())

    @staticmethod
    def _ask_for_too_much(gradient: Tensor) -> Tensor:
        return gradient + torch.empty(2**50, device=gradient.device).sum()


def test_memory_that_runs_out_on_one_rank_is_named(tiny_qwen3: Path, tmp_path: Path) -> None:
    """In seconds, not after the collectives' time is over."""

    async def run_out(services: Services) -> None:
        sequences = random_sequences()
        await services.trainer.train_step(sequences, loss="grpo")
        with pytest.raises(WorkerLostError, match="out of memory on rank 1 in forward_backward"):
            await services.trainer.forward_backward(sequences, loss=OutOfMemoryOnOneRank())

    _with_services(run_out, tiny_qwen3, tmp_path)
