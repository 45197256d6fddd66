"""What a run needs of its hosts, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from apps.grpo.dry_run import DOES_NOT_FIT, FITS, dry_run
from forge_trainer.config import GeneratorConfig, GrpoConfig, ParallelConfig, TrainerConfig
from forge_trainer.config import WeightsConfig as Weights
from forge_trainer.config.load import load_config
from forge_trainer.errors import ConfigError
from forge_trainer.functional.estimates.memory import ModelSize, generator_memory, trainer_memory
from forge_trainer.hf import count_parameters, load_weights
from forge_trainer.processes.hosts import needs
from forge_trainer.types import Gpu, HostInventory

QWEN3_8B = ModelSize(8_190_735_360, 151_936, 36, 128, 40_960)


def test_a_rank_of_an_8b_model_by_hand() -> None:
    """Eight shards: 4 bytes a parameter each for weights and gradients, 8 for AdamW."""
    found = trainer_memory(QWEN3_8B, TrainerConfig(num_ranks=8, compute_dtype="bfloat16"))
    assert found == {
        "weights": 4_095_367_680,
        "gradients": 4_095_367_680,
        "optimizer": 8_190_735_360,
        # Two layers of 1/36 in bfloat16.
        "gathered layers": 910_081_706,
        # 1024 tokens, three times in float32.
        "logits chunk": 1_866_989_568,
        # 36 layers of 40960 positions, sine and cosine of 128 in float32.
        "rope": 1_509_949_440,
    }


def test_layouts_share_and_what_is_frozen_has_no_optimizer() -> None:
    layout = ParallelConfig(tensor=4, data_replicate=2)
    found = trainer_memory(QWEN3_8B, TrainerConfig(num_ranks=8, parallel=layout, trainable=False))
    assert found["weights"] == QWEN3_8B.num_parameters
    assert found["logits chunk"] == 1_866_989_568 // 4
    assert {"gradients", "optimizer", "gathered layers"}.isdisjoint(found)


def test_a_generator_holds_the_logits_of_a_step() -> None:
    """Two slots: 2 x 4 x 151936 bytes, and a fifth of them."""
    config = GeneratorConfig(batch_size=2, max_completion_tokens=10)
    found = generator_memory(QWEN3_8B, config, Weights(dtype="bfloat16"), rows=64)
    assert found == {"weights": 2 * QWEN3_8B.num_parameters, "logits": 1_458_585}
    found = generator_memory(QWEN3_8B, config, Weights(dtype="bfloat16"), rows=1)
    assert found["logits"] == 729_292


def test_a_pipeline_stage_gathers_layers_as_large_as_any() -> None:
    layout = ParallelConfig(pipeline=4)
    whole, staged = (
        trainer_memory(QWEN3_8B, TrainerConfig(num_ranks=8, parallel=parallel))
        for parallel in (ParallelConfig(), layout)
    )
    assert staged["gathered layers"] == whole["gathered layers"]


def test_parameters_are_counted_in_the_files(tiny_qwen3: Path) -> None:
    assert count_parameters(tiny_qwen3) == sum(t.numel() for t in load_weights(tiny_qwen3).values())


def _config(tiny: Path) -> GrpoConfig:
    overrides = ["--run.folder", str(tiny / "run")]
    return load_config(GrpoConfig, "configs/grpo_tiny.yaml", overrides)


def test_a_dry_run_says_what_fits_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = HostInventory(tuple(Gpu(str(i), memory_bytes=10_000_000) for i in range(3)), 4, 10**12)
    assert dry_run(_config(tmp_path), small) == DOES_NOT_FIT
    printed = capsys.readouterr().out
    assert "does not fit: GPU 0 has 0.0 GB; it needs 0.0 GB and activations for trainer" in printed
    assert "GPU 2" not in printed
    large = HostInventory(tuple(Gpu(str(i), memory_bytes=10**10) for i in range(3)), 4, 10**12)
    assert dry_run(_config(tmp_path), large) == FITS
    assert "0, 1" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_looks_at_the_prompts(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "3,7:"}\n')
    task = ["--task.name", "jsonl", "--task.path", str(file), "--task.reward", "exact_match"]
    overrides = ["--run.folder", str(tmp_path / "run"), *task]
    config = load_config(GrpoConfig, "configs/grpo_tiny.yaml", overrides)
    with pytest.raises(ConfigError, match="train.jsonl, line 1: .*there is no column 'answer'"):
        dry_run(config, HostInventory((), 4, 10**12))


def test_too_little_shared_memory_is_known_before_the_first_push(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Docker gives 64 MB, and the first push came after the first step."""
    monkeypatch.setattr(needs, "free_bytes", lambda folder: 1000)
    with pytest.raises(ConfigError, match="weights.transport: .* 0.00 GB free, published weights"):
        needs.with_room(Weights(transport="shared_memory"), tiny_qwen3)
    assert needs.with_room(Weights(), tiny_qwen3).transport == "torchstore"
    assert "weights.transport auto takes torchstore" in caplog.text
    monkeypatch.setattr(needs, "free_bytes", lambda folder: 10**9)
    assert needs.with_room(Weights(), tiny_qwen3).transport == "auto"
