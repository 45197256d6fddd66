"""Generators: completions from models whose weights are pulled."""

from __future__ import annotations

from pathlib import Path

from forge_trainer.config import GeneratorConfig, WeightsConfig

from .generator import ModelGenerator


def make_generator(
    config: GeneratorConfig, weights: WeightsConfig, *, model_dir: Path
) -> ModelGenerator:
    """A generator that runs in the dtype that weights are published in."""
    # Heavy libraries are imported only for the chosen backend.
    import torch

    from .transformers import TransformersModel

    dtype: torch.dtype = getattr(torch, weights.dtype)
    return ModelGenerator(TransformersModel(config, model_dir=model_dir, dtype=dtype))
