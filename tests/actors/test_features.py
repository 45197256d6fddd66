"""Training features that TorchTitan brings: none of them changes the gradient or a name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge_trainer.engine.titan.engine import TitanEngine
from forge_trainer.functional.objective import make_loss
from forge_trainer.functional.packing import PackingPlan, pack_sequences
from tests.actors.conftest import TRAINER
from tests.data import random_sequences


# torch 2.13.0: dynamo looks at the gradient of tensors that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "feature",
    [
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "full"},
        {"compile": True},
    ],
    ids=["selective", "full", "compile"],
)
def test_training_features_change_neither_gradient_nor_names(
    tiny_qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feature: dict[str, object]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    one = TRAINER.model_copy(update={"num_ranks": 1})
    batches = pack_sequences(random_sequences(), dp_size=1, plan=PackingPlan(48, 2)).batches[0]
    results, pieces = [], []
    for config in (one, one.model_copy(update=feature)):
        engine = TitanEngine(config, tiny_qwen3)
        engine.setup()
        engine.forward_backward(batches, make_loss("grpo"))
        results.append(engine.optim_step().grad_norm)
        pieces.append({p.name: p.data for p in engine.weight_pieces(dtype=torch.bfloat16)})
        engine.close()
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert pieces[1].keys() == pieces[0].keys()
    for name, tensor in pieces[0].items():
        assert pieces[1][name].dtype == torch.bfloat16
        torch.testing.assert_close(pieces[1][name], tensor, rtol=1e-2, atol=1e-3)
