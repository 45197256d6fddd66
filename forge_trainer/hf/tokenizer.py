"""A directory's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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


def token_counter(path: Path) -> Callable[[str], int]:
    """Counts the tokens of a text, without a model's library, which takes seconds to import.

    Raises:
        ConfigError: the file is missing or no tokenizer.
    """
    tokenizer = _read_tokenizer(path)
    return lambda text: len(tokenizer.encode(text).ids)


class TextEncoder:
    """Text to token ids, without a model's library.

    Raises:
        ConfigError: the directory has no tokenizer.json, or one that is no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer = _read_tokenizer(path)
        # A tokenizer.json may tell to cut and to fill up, as some model needed it once.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Its token ids; `first`: with the tokens that this tokenizer puts around a whole text.

        Special tokens that are written out in the text become themselves.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=first).ids
        return ids


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
