"""A model of Hugging Face transformers as a forward pass: prompts in, or one token of every row.

It knows neither requests nor sampling. What it cannot run with right positions, masks and caches
is refused.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from forge_trainer.errors import ConfigError

from .slots import Slots

MOVING_ROPES = ("dynamic", "longrope")
"""Rotary embeddings that change with the longest row of a batch: what is cached would be wrong."""


class DecodingModel:
    """Forward passes of a model with a language modelling head."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ConfigError for a model that this does not work with."""
        require_plain_attention(model)
        self._model: Any = model
        self._head: Any = model.get_output_embeddings()
        embedding: Any = model.get_input_embeddings()
        self.config: Any = model.config.get_text_config(decoder=True)
        self.device = model.device
        self.vocab_size = int(embedding.weight.shape[0])

    def prefill(self, rows: Sequence[NDArray[np.int32]]) -> tuple[Tensor, Cache]:
        """Logits [R, V] after the last token of every row, and keys and values of all.

        Rows are padded on the right, so that none of their own tokens sees padding.
        """
        last = [len(row) - 1 for row in rows]
        ids_RT = np.zeros((len(rows), max(last) + 1), np.int32)
        for ids, row in zip(ids_RT, rows, strict=True):
            ids[: len(row)] = row
        positions_RT = torch.arange(ids_RT.shape[1], device=self.device).expand(len(rows), -1)
        cache = DynamicCache(config=self._model.config)
        with self._head_sees_only(last):
            logits_RV = self._forward(ids_RT, positions_RT, cache)
        return logits_RV, cache

    def decode(
        self,
        token_ids: NDArray[np.int32],
        slots: Slots,
        lengths: NDArray[np.int64],
        *,
        limit: int,
    ) -> Tensor:
        """Logits [R, V] after one more token of every row of `slots`; see `Slots.begin_step`."""
        positions_R1, mask = slots.begin_step(lengths, limit=limit, dtype=self._model.dtype)
        return self._forward(token_ids[:, None], positions_R1, slots.cache, mask)

    def tensor(self, values: NDArray[Any]) -> Tensor:
        """A copy on the model's device."""
        return torch.from_numpy(values.copy()).to(self.device)

    def _forward(
        self, ids: NDArray[np.int32], positions: Tensor, cache: Cache, mask: Tensor | None = None
    ) -> Tensor:
        output = self._model(
            input_ids=self.tensor(ids).long(),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        assert output.logits.shape[1] == 1
        logits_RV: Tensor = output.logits[:, 0]
        return logits_RV

    @contextlib.contextmanager
    def _head_sees_only(self, positions: Sequence[int]) -> Iterator[None]:
        """One hidden state of each row goes to the head, whatever else the model does to logits."""
        rows = torch.arange(len(positions), device=self.device)
        chosen = torch.tensor(positions, device=self.device)

        def choose(_: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (given[0][rows, chosen][:, None], *given[1:])

        hook = self._head.register_forward_pre_hook(choose)
        try:
            yield
        finally:
            hook.remove()


def require_plain_attention(model: PreTrainedModel) -> None:
    """Every layer must attend to all earlier tokens through the common cache and masks.

    Raises:
        ConfigError: what it is instead.
    """
    problem = _what_is_special(model)
    if problem is not None:
        raise ConfigError(
            f"generator.backend: transformers cannot sample from {type(model).__name__} with "
            f"{problem}; choose a model without it, or backend: vllm"
        )


def _what_is_special(model: PreTrainedModel) -> str | None:
    config: Any = model.config.get_text_config(decoder=True)
    takes = inspect.signature(type(model.base_model).forward).parameters
    rope = getattr(config, "rope_parameters", None) or {}
    if getattr(model, "_is_stateful", False):
        return "recurrent state"
    if not getattr(model, "_supports_attention_backend", False) or "position_ids" not in takes:
        return "attention of its own, which takes neither masks nor positions as others do"
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers):
        return "layers that do not attend to all earlier tokens, such as those of a sliding window"
    if rope.get("rope_type") in MOVING_ROPES:
        return f"rotary embeddings of type {rope['rope_type']!r}, which change with the length"
    if model.get_output_embeddings() is None:
        return "no language modelling head"
    return None
