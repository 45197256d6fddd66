"""Sampling from a model of Hugging Face transformers, with slots that are filled as they fall free.

A step gives every running request one token. New ones are computed first, equal prompts once; then
they run with the others. Nobody waits for the longest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forge_trainer.config import GeneratorConfig
from forge_trainer.errors import EngineError, WeightsError
from forge_trainer.functional.pieces.manifests import describe_tensor
from forge_trainer.generation.backend import RequestLimits
from forge_trainer.generation.sampling import Draws, draw_tokens, uniforms
from forge_trainer.hf import (
    load_causal_lm,
    load_tokenizer,
    resolve_device,
    special_token_ids,
    stop_token_ids,
    unique_tensors,
)
from forge_trainer.pieces import TensorFacts, WeightsVersion
from forge_trainer.types import Completion, GenerationRequest
from forge_trainer.types.arrays import as_array

from .model import DecodingModel
from .rows import Row, StopStrings, first_numbers
from .slots import Slots

PREFILL_TOKENS = 4096
"""Of prompts that are computed at one time, padding included; a longer prompt is alone."""


class TransformersBackend:
    """Keeps `Backend`. Tokenizer, weights and sampling of a Hugging Face directory."""

    def __init__(self, config: GeneratorConfig, *, model_dir: Path, dtype: torch.dtype) -> None:
        self._config = config
        self._model_dir = model_dir
        self._dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        """What it runs on, to be filled in place; a tied tensor under one of its names."""

    def load(self) -> None:
        """Read the directory.

        Raises:
            ConfigError: the model is of a kind that cannot be sampled from.
        """
        device = resolve_device(self._config.device)
        self._tokenizer: Any = load_tokenizer(self._model_dir)
        model: Any = load_causal_lm(self._model_dir, dtype=self._dtype, device=device)
        found = unique_tensors(model)
        self.tensors = {name: tensor for name, (tensor, _) in found.items()}
        self._tied = {name: tied for name, (_, tied) in found.items()}
        self._stop_ids = stop_token_ids(model.generation_config, self._tokenizer)
        self._model = DecodingModel(model)
        self._slots = Slots(
            model.config, num_slots=self._config.batch_size, device=self._model.device
        )
        self._limits = RequestLimits(
            self._config.max_prompt_tokens,
            self._model.config.max_position_embeddings,
            self._model.vocab_size,
        )
        self._policy_version = 0
        self._limit = 0
        """Tokens that none of the running rows gets beyond."""
        self._added: dict[str, GenerationRequest] = {}
        self._rows: list[Row] = []
        self._numbers = first_numbers([])

    def encode(self, prompt: str) -> list[int]:
        """Its tokens."""
        ids: list[int] = self._tokenizer.encode(prompt)
        return ids

    def check(self, request: GenerationRequest) -> None:
        """Raises DataError for a request that cannot be answered."""
        self._limits.check(request)

    def add(self, request: GenerationRequest) -> None:
        """It joins at the next step."""
        self._added[request.id] = request

    def cancel(self, request_id: str) -> None:
        """Its slot is free at once."""
        if self._added.pop(request_id, None) is None:
            self._leave([i for i, row in enumerate(self._rows) if row.request.id == request_id])

    @property
    def num_unfinished(self) -> int:
        return len(self._added) + len(self._rows)

    @torch.no_grad()
    def step(self) -> list[tuple[str, Completion]]:
        """A token for every request that runs; those that ended.

        Raises:
            EngineError: logits are not finite.
        """
        ended = self._join()
        if self._rows:
            rows, numbers = self._rows, self._numbers
            logits_RV = self._model.decode(
                numbers["token"], self._slots, numbers["length"], limit=self._limit
            )
            self._sample(logits_RV, numbers["temperature"], np.arange(len(rows)), (rows, numbers))
            done = [i for i, row in enumerate(rows) if row.stop_reason is not None]
            ended += [rows[i] for i in done]
            self._leave(done)
        return [(row.request.id, row.completion(self._tokenizer)) for row in ended]

    def _join(self) -> list[Row]:
        """Compute the prompts of what was added, and a token each; rows that have ended with it."""
        requests, self._added = list(self._added.values()), {}
        alike: dict[tuple[bytes, float], list[Row]] = {}
        for request in requests:
            prompt = as_array(request.token_ids).astype(np.int32)
            group = alike.setdefault((prompt.tobytes(), request.sampling.temperature), [])
            # One array for equal prompts: it is pickled once.
            group.append(self._row(request, group[0].prompt if group else prompt))
        groups = sorted(alike.values(), key=lambda group: len(group[0].prompt))
        ended: list[Row] = []
        for batch in _batches([len(group[0].prompt) for group in groups]):
            ended += self._prefill(groups[batch])
        return ended

    def _row(self, request: GenerationRequest, prompt: NDArray[np.int32]) -> Row:
        stop = request.sampling.stop
        ids = self._stop_ids | special_token_ids(self._tokenizer, stop)
        strings = StopStrings(self._tokenizer, stop) if stop else None
        return Row(request, prompt, ids, strings)

    def _prefill(self, groups: Sequence[Sequence[Row]]) -> list[Row]:
        """Equal prompts share a row of the pass. Rows that have ended; the others get slots."""
        logits_PV, cache = self._model.prefill([group[0].prompt for group in groups])
        rows = [row for group in groups for row in group]
        numbers = first_numbers(rows)
        which = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        firsts = np.unique(which, return_index=True)[1]
        self._sample(logits_PV, numbers["temperature"][firsts], which, (rows, numbers))
        going = [i for i, row in enumerate(rows) if row.stop_reason is None]
        if going:
            running = [*self._rows, *(rows[i] for i in going)]
            self._limit = max(row.limit for row in running)
            self._slots.append(cache, which[going], limit=self._limit)
            self._rows, self._numbers = running, np.concatenate([self._numbers, numbers[going]])
        return [row for row in rows if row.stop_reason is not None]

    def _sample(
        self,
        logits_PV: Tensor,
        temperatures_P: NDArray[np.float32],
        which: NDArray[np.int64],
        of: tuple[Sequence[Row], NDArray[Any]],
    ) -> None:
        """Another token for every row, from the logits that `which` names."""
        rows, numbers = of
        tokens, logprobs = draw_tokens(
            logits_PV,
            self._model.tensor(temperatures_P),
            Draws(
                self._model.tensor(which),
                self._model.tensor(uniforms(numbers["seed"], numbers["sampled"])),
                self._model.tensor(numbers["greedy"]),
            ),
        )
        taken = logprobs.cpu().numpy()
        if not np.isfinite(taken).all():
            raise EngineError("the model's logits are not finite; look at its weights")
        numbers["token"] = tokens.cpu().numpy()
        numbers["length"] += 1
        numbers["sampled"] += 1
        for row, token, logprob in zip(rows, tokens.tolist(), taken.tolist(), strict=True):
            row.take(token, logprob, self._policy_version)

    def _leave(self, indices: Sequence[int]) -> None:
        """Let running rows go, and let others take their places as in the slots."""
        if not indices:
            return
        for source, hole in self._slots.remove(indices):
            self._rows[hole] = self._rows[source]
            self._numbers[hole] = self._numbers[source]
        del self._rows[self._slots.num_rows :]
        self._numbers = self._numbers[: self._slots.num_rows]

    @torch.no_grad()
    def use_weights(self, version: WeightsVersion, *, keep_cache: bool) -> None:
        """Go on with what `tensors` hold now; see `Backend`."""
        self._policy_version = version.policy_version
        if keep_cache:
            return
        order = np.argsort(self._numbers["length"], kind="stable")
        known = [self._rows[i].known_ids for i in order]
        for batch in _batches([len(ids) for ids in known]):
            _, cache = self._model.prefill(known[batch])
            self._slots.replace(order[batch], cache, np.arange(len(order[batch])))

    def checksums(self) -> dict[str, TensorFacts]:
        """What it runs on, by name."""
        return {
            name: describe_tensor(tensor.detach().cpu(), self._tied[name])
            for name, tensor in self.tensors.items()
        }

    def read_weight(self, name: str) -> Tensor:
        """A copy on the CPU of a tensor in use, by any of its names.

        Raises:
            WeightsError: there is no such tensor.
        """
        for first, tied in self._tied.items():
            if name in (first, *tied):
                return self.tensors[first].detach().to("cpu", copy=True)
        raise WeightsError(
            f"the generator's model has no tensor {name!r}; weight_checksums names those it has"
        )

    def close(self) -> None:
        """There is nothing to let go of but memory."""


def _batches(lengths: Sequence[int]) -> Iterator[slice]:
    """Which rows, sorted by length, are computed at one time."""
    start = 0
    for index, length in enumerate(lengths):
        if index > start and (index - start + 1) * length > PREFILL_TOKENS:
            yield slice(start, index)
            start = index
    if start < len(lengths):
        yield slice(start, len(lengths))
