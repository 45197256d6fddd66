"""The TorchTitan model that a config.json asks for is the one of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forge_trainer.config import OptimizerConfig, ParamGroupConfig
from forge_trainer.engine.titan.engine import TitanEngine
from forge_trainer.errors import ConfigError
from forge_trainer.functional.losses.objective import make_loss
from forge_trainer.functional.packing import PackingPlan, pack_sequences
from forge_trainer.hf import load_causal_lm
from forge_trainer.types import TrainSequence
from tests.data import random_sequences
from tests.unit.conftest import CONFIG

LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _logprobs(model_dir: Path, tokens: list[int]) -> torch.Tensor:
    engine = TitanEngine(CONFIG, model_dir)
    engine.setup()
    sequence = TrainSequence(tokens, [0] * len(tokens))
    batches = pack_sequences([sequence], dp_size=1, plan=PackingPlan(64, 1)).batches[0]
    (output,) = engine.forward(batches)
    engine.close()
    return output.logprobs_BT[0, 1:]


def test_rope_scaling_of_llama_3_1_is_that_of_transformers(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Positions beyond those of the first training, where every band of frequencies counts."""
    model_dir = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    file = model_dir / "config.json"
    values = json.loads(file.read_text())
    file.write_text(json.dumps({**values, "rope_parameters": LLAMA_3_1}))
    tokens = np.random.default_rng(0).integers(4, 250, 60).tolist()
    model: Any = load_causal_lm(model_dir, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        log_p = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    wanted = log_p[:-1].gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
    torch.testing.assert_close(_logprobs(model_dir, tokens), wanted, rtol=1e-5, atol=1e-5)
    unscaled = _logprobs(tiny_llama, tokens)
    assert (unscaled - wanted).abs().max() > 1e-3, "scaling changes nothing here"


def test_groups_of_parameters_have_rates_of_their_own(tiny_llama: Path) -> None:
    optimizer = OptimizerConfig(
        lr=1e-2,
        name="Adam",
        weight_decay=0.0,
        param_groups=[
            ParamGroupConfig(pattern="norm", lr=0.0),
            ParamGroupConfig(pattern="^lm_head", lr=1e-3, weight_decay=0.1),
        ],
    )
    engine = TitanEngine(CONFIG.model_copy(update={"optimizer": optimizer}), tiny_llama)
    engine.setup()
    before = {name: p.detach().clone() for name, p in engine._model.named_parameters()}
    batches = pack_sequences(random_sequences(), dp_size=1, plan=PackingPlan(48, 4)).batches[0]
    engine.forward_backward(batches, make_loss("grpo"))
    result = engine.optim_step()
    changed = {n for n, p in engine._model.named_parameters() if not torch.equal(p, before[n])}
    engine.close()
    assert changed == {name for name in before if "norm" not in name}
    assert result.learning_rate == 1e-2
    rates = {key: metric.value for key, metric in result.metrics.items() if "rate/" in key}
    assert rates == {"trainer/learning_rate/norm": 0.0, "trainer/learning_rate/^lm_head": 1e-3}


def test_a_group_that_matches_nothing_is_named(tiny_llama: Path) -> None:
    optimizer = OptimizerConfig(param_groups=[ParamGroupConfig(pattern="q_proj", lr=0.0)])
    engine = TitanEngine(CONFIG.model_copy(update={"optimizer": optimizer}), tiny_llama)
    with pytest.raises(ConfigError, match=r"param_groups\.0\.pattern: 'q_proj' matches none"):
        engine.setup()
    engine.close()
