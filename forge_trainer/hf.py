"""Hugging Face directories: what a model is, its tokenizer, its weights, and tiny ones on the fly.

Reading facts needs no torch, so a config is checked against its model before any process starts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_trainer.config.schema import GeneratorConfig, TinyModelConfig, TrainerConfig
from forge_trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TITAN_MODEL_TYPES = ("llama", "qwen3")
"""`model_type`s of config.json that the titan engine can build."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `config.json` says, as far as the trainer cares."""

    path: str
    model_type: str
    vocab_size: int
    num_heads: int
    num_kv_heads: int
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


def check_model(path: Path, trainer: TrainerConfig, generator: GeneratorConfig) -> ModelFacts:
    """The model's facts, once trainer, generator and tokenizer are known to fit it.

    Raises:
        ConfigError: with the key, what was given and what is allowed.
    """
    facts = read_model_facts(path)
    check_trainer_fits_model(trainer, facts)
    check_generator_fits_model(generator, facts)
    check_tokenizer_fits_model(path, facts)
    return facts


def read_model_facts(path: Path) -> ModelFacts:
    """The facts in `path/config.json`.

    Raises:
        ConfigError: the file is missing, unreadable or lacks a key.
    """
    config = read_hf_config(path)
    try:
        return ModelFacts(
            path=str(path),
            model_type=config["model_type"],
            vocab_size=config["vocab_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            max_sequence_tokens=config["max_position_embeddings"],
            tie_embeddings=config.get("tie_word_embeddings", False),
        )
    except KeyError as error:
        raise ConfigError(f"{path / 'config.json'} lacks the key {error}") from error


def read_hf_config(path: Path) -> dict[str, Any]:
    """`path/config.json` as it stands."""
    file = path / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    return config


def check_trainer_fits_model(trainer: TrainerConfig, facts: ModelFacts) -> None:
    """Relations between the trainer's config and the model's.

    Raises:
        ConfigError: with the key, what was given and what is allowed.
    """
    if trainer.engine == "titan" and facts.model_type not in TITAN_MODEL_TYPES:
        raise ConfigError(
            f"model.path: {facts.path} is a {facts.model_type!r} model; trainer.engine 'titan' "
            f"supports {', '.join(TITAN_MODEL_TYPES)} (dense)"
        )
    tensor = trainer.parallel.tensor
    for name, heads in (("attention", facts.num_heads), ("key-value", facts.num_kv_heads)):
        if heads % tensor:
            raise ConfigError(
                f"trainer.parallel.tensor: {tensor} does not divide the model's {heads} "
                f"{name} heads"
            )
    for axis in ("tensor", "pipeline"):
        if getattr(trainer.parallel, axis) > 1:
            raise ConfigError(
                f"trainer.parallel.{axis}: only 1 is supported so far, got "
                f"{getattr(trainer.parallel, axis)}"
            )
    longest = trainer.max_sequence_tokens
    if longest is not None and longest > facts.max_sequence_tokens:
        raise ConfigError(
            f"trainer.max_sequence_tokens: {longest} exceeds the model's "
            f"max_position_embeddings={facts.max_sequence_tokens}"
        )


def check_generator_fits_model(generator: GeneratorConfig, facts: ModelFacts) -> None:
    """A prompt and its completion must fit into the model.

    Raises:
        ConfigError: with the keys, what was given and what is allowed.
    """
    wanted = generator.max_prompt_tokens + generator.max_completion_tokens
    if wanted > facts.max_sequence_tokens:
        raise ConfigError(
            f"generator.max_prompt_tokens + generator.max_completion_tokens: {wanted} exceed the "
            f"model's max_position_embeddings={facts.max_sequence_tokens}"
        )


def check_tokenizer_fits_model(path: Path, facts: ModelFacts) -> None:
    """Every token of the tokenizer must have an embedding.

    Raises:
        ConfigError: the tokenizer is missing or has more tokens than the model.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{path} has no tokenizer.json; a model directory needs its tokenizer")
    size = Tokenizer.from_file(str(file)).get_vocab_size(with_added_tokens=True)
    if size > facts.vocab_size:
        raise ConfigError(
            f"model.path: the tokenizer of {path} has {size} tokens, the model has embeddings for "
            f"vocab_size={facts.vocab_size}; they do not belong together"
        )


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


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
