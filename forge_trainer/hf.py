"""Hugging Face directories: a model's facts, tokenizer and weights, and tiny ones on the fly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_trainer.config import ModelConfig, TinyModelConfig
from forge_trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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


def model_directory(model: ModelConfig, scratch: Path, *, seed: int) -> Path:
    """The directory of the configured model; a tiny one is made in `scratch`.

    Raises:
        ConfigError: see `find_model_dir`.
    """
    if model.tiny is not None:
        return create_tiny_model(scratch, model.tiny, seed=seed)
    return find_model_dir(str(model.path))


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


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one.

    Raises:
        ConfigError: a GPU is asked for and there is none.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: 'cuda' is asked for, but torch finds no GPU here")
    return torch.device(name)


def largest_token_id(path: Path) -> int:
    """The largest id in the directory's tokenizer.json; -1 if it has no token.

    Raises:
        ConfigError: the file is missing or no tokenizer.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{path} has no tokenizer.json; a model directory needs its tokenizer")
    try:
        ids = Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values()
    except Exception as error:
        raise ConfigError(f"{file} is no tokenizer: {error}") from error
    return max(ids, default=-1)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The directory's tokenizer, with a padding token."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(
    path: str | Path, *, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The directory's model in `dtype` on `device`, in evaluation mode."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
    model.to(device)  # type: ignore[arg-type]
    model.eval()
    return model


def unique_tensors(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
    """Parameters and saved buffers by first name, each with further names of the same tensor."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return {names[0]: (tensor, tuple(names[1:])) for tensor, names in found.values()}


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the directory's safetensors files, memory-mapped.

    Raises:
        ConfigError: no safetensors file.
    """
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{path} has no *.safetensors file to load weights from")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def create_tiny_model(folder: Path, tiny: TinyModelConfig, *, seed: int) -> Path:
    """Write a model with random weights and a byte-level tokenizer; the same for the same seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokenizer = _byte_level_tokenizer()
    tokenizer.save_pretrained(folder)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "num_key_value_heads": tiny.num_kv_heads,
        "head_dim": tiny.head_dim,
        "max_position_embeddings": tiny.max_sequence_tokens,
        "tie_word_embeddings": tiny.tie_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if tiny.architecture == "qwen3":
            model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**shape))
        else:
            model = LlamaForCausalLM(LlamaConfig(**shape))
    model.to(torch.float32).save_pretrained(folder)  # type: ignore[arg-type]
    return folder


def _byte_level_tokenizer() -> PreTrainedTokenizerBase:
    """256 bytes and four special tokens, no merges: every text has an encoding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
