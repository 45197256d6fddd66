"""What a directory's config.json says, and where the directory is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch


NO_GPUS = (
    "the hosts have none; where they are others than this machine, launch.gpus_per_host says how "
    "many they have"
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `config.json` says, as far as the trainer cares."""

    path: str
    model_type: str
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    num_layers: int
    attention_width: int
    """Heads times their size."""
    max_sequence_tokens: int
    tie_embeddings: bool


def find_model_dir(path: str) -> Path:
    """The local directory of a model that is given by directory or hub id.

    Raises:
        ConfigError: neither a directory nor a hub id that can be fetched.
    """
    local = Path(path)
    if local.is_dir():
        return local
    if local.exists() or path.startswith((".", "/", "~")):
        raise ConfigError(f"model.path: {path!r} is not a directory; give a Hugging Face one")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:
        raise ConfigError(
            f"model.path: {path!r} is no local directory and cannot be fetched from the hub: "
            f"{type(error).__name__}: {error}"
        ) from error


def read_model_facts(path: Path) -> ModelFacts:
    """The facts in `path/config.json`.

    Raises:
        ConfigError: the file is missing, unreadable or lacks a key.
    """
    config = read_hf_config(path)
    if "num_attention_heads" not in config or "max_position_embeddings" not in config:
        config = _with_common_names(path, config)
    try:
        return ModelFacts(
            path=str(path),
            model_type=config["model_type"],
            vocab_size=config["vocab_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            num_layers=config["num_hidden_layers"],
            attention_width=config["num_attention_heads"] * config["head_dim"]
            if config.get("head_dim")
            else config.get("hidden_size", 0),
            max_sequence_tokens=config["max_position_embeddings"],
            tie_embeddings=config.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise ConfigError(f"{path / 'config.json'} lacks the key {error}") from error


def _with_common_names(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Some families call things otherwise (GPT-2: n_head); transformers knows their names."""
    from transformers import AutoConfig

    try:
        known = AutoConfig.from_pretrained(str(path))
    except Exception as error:
        raise ConfigError(f"{path / 'config.json'}: {error}") from error
    names = ("num_attention_heads", "num_hidden_layers", "max_position_embeddings", "vocab_size")
    return {**config, **{name: getattr(known, name) for name in names if hasattr(known, name)}}


def read_hf_config(path: Path) -> dict[str, Any]:
    """`path/config.json` as it stands."""
    file = path / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} must hold an object, got {type(config).__name__}")
    return config


def require_full_attention(path: Path) -> None:
    """Every layer must attend to all earlier tokens, as far as `path/config.json` says.

    Raises:
        ConfigError: some see a sliding window or something else.
    """
    config = read_hf_config(path)
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if "layer_types" not in config and window is not None:
        kinds = {f"sliding_attention of {window} tokens"}
    if kinds:
        raise ConfigError(
            f"generator.backend: transformers samples from models whose layers attend to all "
            f"earlier tokens, {path} has {', '.join(sorted(kinds))}; choose a model without it, or "
            "backend: vllm"
        )


def resolve_device(name: str, num_gpus: int | None = None) -> torch.device:
    """`auto` is the GPU where there is one; how many there are, torch is asked unless told.

    Raises:
        ConfigError: a GPU is asked for and there is none.
    """
    import torch

    there_are_some = torch.cuda.is_available() if num_gpus is None else num_gpus > 0
    if name == "auto":
        name = "cuda" if there_are_some else "cpu"
    if name == "cuda" and not there_are_some:
        found = "torch finds no GPU here" if num_gpus is None else NO_GPUS
        raise ConfigError(f"device: 'cuda' is asked for, but {found}")
    return torch.device(name)
