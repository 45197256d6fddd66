"""Training features that TorchTitan brings: none of them changes a name, most not the gradient."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from forge_trainer.config import TrainerConfig
from forge_trainer.controller.in_process import start_in_process_trainer
from forge_trainer.engine.titan.engine import TitanEngine
from forge_trainer.functional.losses.objective import make_loss
from forge_trainer.functional.packing import PackingPlan, pack_sequences
from forge_trainer.types import LossOutput, OptimParams, TrainBatch, World
from tests.actors.conftest import TRAINER
from tests.data import random_sequences
from tests.ranks import RankPool
from tests.weights import published_by

ONE = TRAINER.model_copy(update={"num_ranks": 1})


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Processes without shape checks, which torch.compile does not understand."""
    with pytest.MonkeyPatch.context() as patched:
        # Inductor keeps some of its files beside temporary ones, whatever its own setting says.
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TMPDIR"):
            patched.setenv(name, str(tmp_path_factory.mktemp("inductor")))
        with RankPool(2) as pool:
            yield pool


def _one_step(rank: int, model_dir: Path, config: TrainerConfig) -> tuple[float, dict[str, Tensor]]:
    """Gradient norm, and the weights after the update."""
    batches = pack_sequences(random_sequences(), dp_size=1, plan=PackingPlan(48, 2)).batches[0]
    engine = TitanEngine(config, model_dir)
    engine.setup()
    engine.forward_backward(batches, make_loss("grpo"))
    assert {p.grad.dtype for p in engine._model.parameters()} == {torch.float32}
    norm = engine.optim_step().grad_norm
    pieces = published_by(engine, torch.bfloat16)
    engine.close()
    return norm, pieces


@pytest.mark.parametrize(
    "feature",
    [
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
        {"compile": ["loss"]},
    ],
    ids=["selective", "full", "compiled loss"],
)
def test_training_features_change_neither_gradient_nor_names(
    pool: RankPool, tiny_qwen3: Path, feature: dict[str, object]
) -> None:
    ((wanted_norm, wanted),) = pool.run(1, _one_step, tiny_qwen3, ONE)
    ((norm, found),) = pool.run(1, _one_step, tiny_qwen3, ONE.model_copy(update=feature))
    assert norm == pytest.approx(wanted_norm, rel=1e-5)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == torch.bfloat16
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-3)


def _ten_calls(
    rank: int, model_dir: Path, config: TrainerConfig
) -> tuple[dict[str, int], list[float], set[str]]:
    """Graphs that ten calls of different lengths make, by mode; gradient norms; weights' names."""
    torch._dynamo.reset()
    engine = TitanEngine(config, model_dir)
    engine.setup()
    plan = PackingPlan(48, 4, steady_shapes=True)
    counters = torch._dynamo.utils.counters["stats"]
    made, norms = {}, []
    for mode in ("forward_backward", "forward"):
        counters.clear()
        rng = random.Random(0)
        for call in range(10):
            sequences = random_sequences(rng.randint(1, 24), seed=call)
            batches = pack_sequences(sequences, dp_size=1, plan=plan).batches[0]
            if mode == "forward":
                engine.forward(batches)
            else:
                engine.forward_backward(batches, make_loss("grpo"))
                norms.append(engine.optim_step(params=OptimParams(lr=0.0)).grad_norm)
        made[mode] = counters["unique_graphs"]
    names = set(published_by(engine, torch.bfloat16))
    engine.close()
    return made, norms, names


def test_a_compiled_model_has_the_same_gradient_and_compiles_at_most_twice(
    pool: RankPool, tiny_qwen3: Path
) -> None:
    """T was the longest row and B whatever came, so that nearly every call compiled anew."""
    ((_, wanted, names),) = pool.run(1, _ten_calls, tiny_qwen3, ONE)
    compiled = ONE.model_copy(update={"compile": ["model"]})
    ((made, norms, compiled_names),) = pool.run(1, _ten_calls, tiny_qwen3, compiled)
    assert 1 <= made["forward_backward"] <= 2
    assert 1 <= made["forward"] <= 2
    assert norms == pytest.approx(wanted, rel=1e-5)
    assert compiled_names == names


@pytest.mark.parametrize(
    "feature",
    [
        {"compute_dtype": "bfloat16"},
        pytest.param(
            {"float8": "emulated"},
            # Not a development tool: transformers imports torchao wherever it is installed.
            marks=pytest.mark.skipif(find_spec("torchao") is None, reason="needs the extra float8"),
        ),
    ],
    ids=["bfloat16", "float8"],
)
def test_lower_precision_rounds_products_and_keeps_names(
    pool: RankPool, tiny_qwen3: Path, feature: dict[str, object]
) -> None:
    """Parameters and the sums over ranks stay float32."""
    ((wanted_norm, wanted),) = pool.run(1, _one_step, tiny_qwen3, ONE)
    ((norm, found),) = pool.run(1, _one_step, tiny_qwen3, ONE.model_copy(update=feature))
    assert found.keys() == wanted.keys()
    assert norm != pytest.approx(wanted_norm, rel=1e-5)
    assert norm == pytest.approx(wanted_norm, rel=0.05)


def _accumulate(rank: int, model_dir: Path, deferred: bool) -> tuple[int, dict[str, Tensor], float]:
    """(reduce-scatters of one call of three microbatches, gradients, norm after an error)."""
    config = TRAINER.model_copy(update={"defer_gradient_reduction": deferred})
    engine = TitanEngine(config, model_dir, World(rank, rank, 2))
    engine.setup()
    packed = pack_sequences(random_sequences(16), dp_size=2, plan=PackingPlan(20, 2))
    batches, loss = packed.batches[rank], make_loss("grpo")
    assert len(batches) >= 3

    calls = 0

    def interrupted(logprobs_BT: Tensor, batch: TrainBatch) -> LossOutput:
        nonlocal calls
        calls += int(logprobs_BT.requires_grad)
        if calls == 2:
            raise KeyboardInterrupt
        return LossOutput(total=-logprobs_BT.sum())

    reduce_scatter = dist.reduce_scatter_single
    with patch.object(dist, "reduce_scatter_single", side_effect=reduce_scatter) as counted:
        engine.forward_backward(batches, loss)
    reductions = counted.call_count
    gradients: dict[str, Tensor] = {
        name: p.grad.full_tensor().clone() for name, p in engine._model.named_parameters()
    }
    # Half a call that ends for another reason than a failing loss leaves nothing behind.
    engine.clear_gradients()
    with pytest.raises(KeyboardInterrupt):
        engine.forward_backward(batches, interrupted)
    engine.forward_backward(batches, loss)
    norm = engine.optim_step().grad_norm
    engine.close()
    return reductions, gradients, norm


def test_reduction_can_wait_for_the_last_microbatch(pool: RankPool, tiny_qwen3: Path) -> None:
    """The same gradient from a fraction of the collectives; half a call leaves nothing behind."""
    (now, wanted, wanted_norm), _ = pool.run(2, _accumulate, tiny_qwen3, False)
    (deferred, found, norm), _ = pool.run(2, _accumulate, tiny_qwen3, True)
    assert 0 < 2 * deferred <= now
    assert norm == pytest.approx(wanted_norm, rel=1e-5)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)


def test_chosen_steps_are_traced(tiny_qwen3: Path, tmp_path: Path) -> None:
    """One file per step and rank, of the whole step, that Perfetto reads."""
    config = ONE.model_copy(
        update={
            "profiling": ONE.profiling.model_copy(
                update={"folder": str(tmp_path / "profiles"), "trace_steps": [2]}
            )
        }
    )

    async def scenario() -> None:
        trainer = await start_in_process_trainer(
            config, model_dir=tiny_qwen3, checkpoint_folder=tmp_path
        )
        for _ in range(3):
            await trainer.train_step(random_sequences(4), loss="grpo")
        await trainer.close()

    asyncio.run(scenario())
    (file,) = (tmp_path / "profiles").iterdir()
    assert file.name == "step-2-rank-0.trace.json.gz"
    trace = json.loads(gzip.decompress(file.read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", "aten::_foreach_norm"} <= names
