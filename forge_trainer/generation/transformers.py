"""A model of Hugging Face transformers that completes prompts: batched sampling on CPU or GPU.

It knows no versions and no turns. A call holds the logits of one batch:
batch_size * max_completion_tokens * V float32 numbers. Sampling has its own random state, so that
the same calls give the same completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig

from forge_trainer.config import GeneratorConfig
from forge_trainer.errors import DataError, WeightsError
from forge_trainer.functional.pieces.manifests import describe_tensor
from forge_trainer.hf import load_causal_lm, load_tokenizer, resolve_device, unique_tensors
from forge_trainer.pieces import TensorFacts
from forge_trainer.types import Completion, SamplingParams


class TransformersModel:
    """Tokenizer, weights and sampling of a Hugging Face directory. Call `load` first."""

    def __init__(self, config: GeneratorConfig, *, model_dir: Path, dtype: torch.dtype) -> None:
        self._config = config
        self._model_dir = model_dir
        self._dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        """What it runs on, to be filled in place; a tied tensor under one of its names."""

    def load(self) -> None:
        """Read the directory."""
        self._device = resolve_device(self._config.device)
        self._tokenizer = load_tokenizer(self._model_dir)
        self._tokenizer.padding_side = "left"
        self._model: Any = load_causal_lm(self._model_dir, dtype=self._dtype, device=self._device)
        found = unique_tensors(self._model)
        self.tensors = {name: tensor for name, (tensor, _) in found.items()}
        self._tied = {name: tied for name, (_, tied) in found.items()}
        self._stop_ids = _stop_token_ids(self._model.generation_config, self._tokenizer)
        # Nothing of the directory's sampling defaults may survive: they would make the log-probs
        # those of another distribution.
        self._model.generation_config = GenerationConfig()
        with torch.random.fork_rng(devices=self._gpus):
            torch.manual_seed(self._config.seed or 0)
            self._rng_states = _get_rng_states(self._device)

    @property
    def _gpus(self) -> list[torch.device]:
        """Whose random state sampling changes; unnamed, torch would save that of every GPU."""
        return [self._device] if self._device.type == "cuda" else []

    def complete(
        self, prompts: Sequence[str], sampling: SamplingParams, *, policy_version: int
    ) -> list[list[Completion]]:
        """`sampling.num_completions` completions for every prompt.

        Raises:
            DataError: a prompt is empty or too long, or its completion would not fit.
        """
        prompt_ids = [self._encode(prompt, sampling) for prompt in prompts]
        G = sampling.num_completions
        rows = [ids for ids in prompt_ids for _ in range(G)]
        size = self._config.batch_size
        completions: list[Completion] = []
        with torch.random.fork_rng(devices=self._gpus):
            _set_rng_states(self._rng_states, self._device)
            for start in range(0, len(rows), size):
                completions += self._sample(rows[start : start + size], sampling, policy_version)
            self._rng_states = _get_rng_states(self._device)
        return [completions[i * G : (i + 1) * G] for i in range(len(prompts))]

    def _encode(self, prompt: str, sampling: SamplingParams) -> list[int]:
        ids: list[int] = self._tokenizer.encode(prompt)
        if not ids:
            raise DataError("a prompt has no tokens; give at least one character")
        if len(ids) > self._config.max_prompt_tokens:
            raise DataError(
                f"a prompt has {len(ids)} tokens, generator.max_prompt_tokens is "
                f"{self._config.max_prompt_tokens}: {prompt[:80]!r}"
            )
        limit = self._model.config.max_position_embeddings
        if len(ids) + sampling.max_completion_tokens > limit:
            raise DataError(
                f"a prompt of {len(ids)} tokens and max_completion_tokens="
                f"{sampling.max_completion_tokens} exceed the model's "
                f"max_position_embeddings={limit}"
            )
        return ids

    @torch.no_grad()
    def _sample(
        self, rows: list[list[int]], sampling: SamplingParams, policy_version: int
    ) -> list[Completion]:
        """One completion for every row of prompt token ids."""
        padded = self._tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(self._device)
        output = self._model.generate(
            **padded,
            do_sample=True,
            temperature=sampling.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=sampling.max_completion_tokens,
            eos_token_id=self._stop_ids or None,
            pad_token_id=self._tokenizer.pad_token_id,
            return_dict_in_generate=True,
            output_logits=True,
            past_key_values=self._shared_prefill(rows, padded),
        )
        new_ids_BT = output.sequences[:, padded["input_ids"].shape[1] :]
        logits_BTV = torch.stack(output.logits, dim=1).float() / sampling.temperature
        logprobs_BT = torch.log_softmax(logits_BTV, dim=-1).gather(-1, new_ids_BT[..., None])
        new_ids = new_ids_BT.int().cpu().numpy()
        new_logprobs = logprobs_BT.squeeze(-1).cpu().numpy()
        ends = [np.flatnonzero(row) for row in np.isin(new_ids, self._stop_ids)]
        # One array for equal prompts: it is pickled once.
        prompts = {tuple(row): np.array(row, np.int32) for row in rows}
        return [
            Completion(
                prompt_token_ids=prompts[tuple(prompt)],
                token_ids=ids[:length],
                logprobs=logprobs[:length],
                text=str(self._tokenizer.decode(ids[:length], skip_special_tokens=True)),
                policy_versions=np.full(length, policy_version, np.int32),
                temperature=sampling.temperature,
                stop_reason="stop" if end.size else "length",
            )
            for prompt, ids, logprobs, end in zip(rows, new_ids, new_logprobs, ends, strict=True)
            for length in [int(end[0]) + 1 if end.size else len(ids)]
        ]

    def _shared_prefill(self, rows: list[list[int]], padded: Any) -> Any:
        """Keys and values of all prompt tokens but the last, computed once for equal prompts.

        None where that would save nothing.
        """
        distinct: dict[tuple[int, ...], int] = {}
        which = [distinct.setdefault(tuple(row), len(distinct)) for row in rows]
        ids_BT, mask_BT = padded["input_ids"][:, :-1], padded["attention_mask"][:, :-1]
        if len(distinct) == len(rows) or ids_BT.shape[1] == 0:
            return None
        first = [which.index(number) for number in range(len(distinct))]
        cache = self._model(
            input_ids=ids_BT[first],
            attention_mask=mask_BT[first],
            # Padding is on the left: the first real token has position 0.
            position_ids=(mask_BT[first].cumsum(-1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        ).past_key_values
        cache.batch_select_indices(torch.tensor(which, device=self._device))
        return cache

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


def _stop_token_ids(generation: GenerationConfig, tokenizer: Any) -> list[int]:
    """The directory's stop tokens, with the tokenizer's own end of sequence."""
    configured = generation.eos_token_id
    ids = set(configured if isinstance(configured, list) else [configured])
    return sorted(token for token in ids | {tokenizer.eos_token_id} if token is not None)


def _get_rng_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_gpu


def _set_rng_states(states: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)
