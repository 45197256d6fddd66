"""Which models the titan engine can build, read off `config.json`. Imports no torchtitan."""

from __future__ import annotations

import importlib.util
from typing import Any

from forge_trainer.errors import ConfigError

ROPE_TYPES = {"llama": ("default", "llama3"), "qwen3": ("default",)}
"""Supported `model_type`s, each with its kinds of rotary embedding."""
LLAMA3_ROPE_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
FLOAT8_CAPABILITY = (8, 9)
REQUIRED_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)


def refuse_unsupported(hf_config: dict[str, Any]) -> None:
    """Raises ConfigError for a model that TorchTitan's families do not cover."""
    model_type = hf_config.get("model_type")
    if model_type not in ROPE_TYPES:
        raise ConfigError(
            f"model.path: is a {model_type!r} model; trainer.engine 'titan' supports "
            f"{', '.join(ROPE_TYPES)} (dense)"
        )
    missing = [key for key in REQUIRED_KEYS if key not in hf_config]
    if missing:
        raise ConfigError(f"model.path: config.json lacks {', '.join(missing)}")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if hf_config.get(key):
            raise ConfigError(f"model.path: config.json sets {key}, which TorchTitan's model lacks")
    activation = hf_config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(
            f"model.path: hidden_act is {activation!r}; TorchTitan's model has 'silu'"
        )
    rope_type = rope_parameters(hf_config)["rope_type"]
    if rope_type not in ROPE_TYPES[model_type]:
        raise ConfigError(
            f"model.path: rope_type {rope_type!r} is not supported for {model_type}; use one of "
            f"{', '.join(ROPE_TYPES[model_type])}"
        )
    lacking = [key for key in LLAMA3_ROPE_KEYS if key not in rope_parameters(hf_config)]
    if rope_type == "llama3" and lacking:
        raise ConfigError(
            f"model.path: config.json asks for rope_type 'llama3' but lacks {', '.join(lacking)}"
        )


def require_float8(recipe: str, device: str, capability: tuple[int, int] | None = None) -> None:
    """Raises ConfigError for float8 products that the device, `cpu` or `cuda`, cannot compute.

    Without its capability, a GPU is taken to be able to.
    """
    if recipe == "none":
        return
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"trainer.float8: {recipe!r} needs torchao; install it with `uv sync --extra float8`"
        )
    if recipe == "emulated":
        return
    if device != "cuda" or (capability or FLOAT8_CAPABILITY) < FLOAT8_CAPABILITY:
        raise ConfigError(
            f"trainer.float8: {recipe!r} needs a GPU of compute capability 8.9 or later, got "
            f"{device}; use 'emulated' to see what the rounding does"
        )


def rope_parameters(hf_config: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling."""
    found = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    theta = found.get("rope_theta") or hf_config.get("rope_theta", 10000.0)
    kind = found.get("rope_type") or found.get("type") or "default"
    return {**found, "rope_theta": theta, "rope_type": kind}
