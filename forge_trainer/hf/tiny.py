"""Tiny models made on the fly."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forge_trainer.config import ModelConfig, TinyModelConfig

from .facts import find_model_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def model_directory(model: ModelConfig, scratch: Path, *, seed: int) -> Path:
    """The directory of the configured model; a tiny one is made in `scratch`.

    Raises:
        ConfigError: see `find_model_dir`.
    """
    if model.tiny is not None:
        return create_tiny_model(scratch, model.tiny, seed=seed)
    return find_model_dir(str(model.path))


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
