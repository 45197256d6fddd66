"""Generators: completions from models whose weights are pulled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forge_trainer.config import GeneratorConfig, WeightsConfig

from .generator import ModelGenerator

if TYPE_CHECKING:
    from .backend import Backend


def make_backend(config: GeneratorConfig, weights: WeightsConfig, *, model_dir: Path) -> Backend:
    """What samples, in the dtype that weights are published in. Nothing is loaded yet."""
    # Heavy libraries are imported only for the chosen backend.
    import torch

    dtype: torch.dtype = getattr(torch, weights.dtype)
    if config.backend == "vllm":
        from .vllm.backend import VllmBackend

        return VllmBackend(config, model_dir=model_dir, dtype=dtype)
    from .transformers.backend import TransformersBackend

    return TransformersBackend(config, model_dir=model_dir, dtype=dtype)


def make_generator(
    config: GeneratorConfig, weights: WeightsConfig, *, model_dir: Path
) -> ModelGenerator:
    """A generator over the configured backend."""
    return ModelGenerator(make_backend(config, weights, model_dir=model_dir), config)
