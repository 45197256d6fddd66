"""A directory's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_trainer.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def largest_token_id(path: Path) -> int:
    """The largest id in the directory's tokenizer.json; -1 if it has no token.

    Raises:
        ConfigError: the file is missing or no tokenizer.
    """
    return max(_read_tokenizer(path).get_vocab(with_added_tokens=True).values(), default=-1)


def count_tokens(path: Path, texts: Sequence[str]) -> list[int]:
    """Tokens of each text, without a model's library: it takes seconds to import.

    Raises:
        ConfigError: the file is missing or no tokenizer.
    """
    return [len(encoding.ids) for encoding in _read_tokenizer(path).encode_batch(list(texts))]


def _read_tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{path} has no tokenizer.json; a model directory needs its tokenizer")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(f"{file} is no tokenizer: {error}") from error


def require_special_tokens(path: Path) -> None:
    """Raises ConfigError unless prompts of one batch can be padded."""
    file = path / "tokenizer_config.json"
    if not file.is_file():
        raise ConfigError(
            f"model.path: {path} has no tokenizer_config.json, without which transformers adds "
            "tokens that the model has no embeddings for; add it"
        )
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not (values.get("pad_token") or values.get("eos_token")):
        raise ConfigError(
            f"model.path: the tokenizer of {path} has neither a padding nor an end-of-sequence "
            "token; set eos_token in its tokenizer_config.json"
        )


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The directory's tokenizer, with a padding token."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path))
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_token_ids(generation: Any, tokenizer: Any) -> frozenset[int]:
    """The directory's stop tokens, with the tokenizer's own end of sequence."""
    configured = generation.eos_token_id
    ids = set(configured if isinstance(configured, list) else [configured])
    return frozenset(token for token in ids | {tokenizer.eos_token_id} if token is not None)


def special_token_ids(tokenizer: Any, strings: Sequence[str]) -> frozenset[int]:
    """Those of the strings that are special tokens: no part of a text, where nobody finds them."""
    special = set(tokenizer.all_special_tokens).intersection(strings) if strings else set()
    return frozenset(tokenizer.convert_tokens_to_ids(list(special)))
