"""What a generator samples with, and what every backend refuses alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from forge_trainer.errors import DataError
from forge_trainer.pieces import TensorFacts, WeightsVersion
from forge_trainer.types import Completion, GenerationRequest
from forge_trainer.types.arrays import as_array


class Backend(Protocol):
    """A model that samples. It knows no event loop, no turns and no pulls.

    All methods but `check` run on one thread. At most `batch_size` requests are unfinished at one
    time: whoever drives it keeps the others waiting.
    """

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """What a pull fills in place, by Hugging Face names; a tied tensor under one of them.

        They are what it runs on, or a staging copy that `use_weights` takes over.
        """
        ...

    def load(self) -> None:
        """Read the directory. Its weights are policy version 0.

        Raises:
            ConfigError: the model is of a kind that cannot be sampled from.
        """
        ...

    def encode(self, prompt: str) -> list[int]:
        """Its tokens."""
        ...

    def check(self, request: GenerationRequest) -> None:
        """Whether it can be answered; quick, and on any thread once `load` is done.

        Raises:
            DataError: it is empty or too long, or its completion would not fit.
        """
        ...

    def add(self, request: GenerationRequest) -> None:
        """It joins at the next step."""
        ...

    def cancel(self, request_id: str) -> None:
        """No completion follows, its slot is free, its neighbours go on. Nothing if unknown."""
        ...

    def step(self) -> list[tuple[str, Completion]]:
        """One decoding step of all that run; ids and completions of those that ended.

        After an error, all that run are cancelled by whoever drives it.
        """
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests that were added, and neither ended nor were cancelled."""
        ...

    def use_weights(self, version: WeightsVersion, *, keep_cache: bool) -> None:
        """Go on with the weights that `tensors` have been filled with.

        Caches of prefixes are emptied. Requests that run go on: their keys and values are computed
        again, or kept, which is an approximation. Tokens from now on carry
        `version.policy_version`.
        """
        ...

    def checksums(self) -> dict[str, TensorFacts]:
        """What it runs on, by name."""
        ...

    def read_weight(self, name: str) -> Tensor:
        """A copy on the CPU of a tensor in use, by any of its names.

        Raises:
            WeightsError: there is no such tensor.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a backend takes."""

    max_prompt_tokens: int
    """generator.max_prompt_tokens"""
    max_position_embeddings: int
    """Of the model: a prompt and its completion."""
    vocab_size: int
    """Of the model: rows of its embedding."""

    def check(self, request: GenerationRequest) -> None:
        """See `Backend.check`."""
        ids = as_array(request.token_ids)
        wanted = request.sampling.max_completion_tokens
        if not len(ids):
            raise DataError("a prompt has no tokens; give at least one character")
        if len(ids) > self.max_prompt_tokens:
            raise DataError(
                f"a prompt has {len(ids)} tokens, generator.max_prompt_tokens is "
                f"{self.max_prompt_tokens}"
            )
        if len(ids) + wanted > self.max_position_embeddings:
            raise DataError(
                f"a prompt of {len(ids)} tokens and max_completion_tokens={wanted} exceed the "
                f"model's max_position_embeddings={self.max_position_embeddings}"
            )
        if np.any(ids < 0) or np.any(ids >= self.vocab_size):
            raise DataError(
                f"a prompt has token ids from {ids.min()} to {ids.max()}, the model has "
                f"embeddings for 0 to {self.vocab_size - 1}; encode it with the model's tokenizer"
            )
        if "" in request.sampling.stop:
            raise DataError("a stop string is empty, which is everywhere; leave it out")
