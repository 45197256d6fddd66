"""Generator on Hugging Face transformers: batched sampling on CPU or GPU.

A call holds the logits of one batch: batch_size * max_completion_tokens * V float32 numbers.
Sampling has its own random state, so that the same calls give the same completions.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig

from forge_trainer.config.schema import GeneratorConfig
from forge_trainer.errors import DataError, TornWeightsError, WeightsError
from forge_trainer.functional.pieces.manifests import describe_tensor, num_bytes_of
from forge_trainer.hf import load_causal_lm, load_tokenizer, resolve_device, unique_tensors
from forge_trainer.pieces import TensorFacts, WeightChecksums, WeightsRef, WeightsVersion
from forge_trainer.protocols import WeightStore
from forge_trainer.status import GeneratorStatus, TransferStatus
from forge_trainer.tasks import to_the_end
from forge_trainer.types import Completion, SamplingParams

T = TypeVar("T")


class TransformersGenerator:
    """Keeps the `Generator` protocol. Call `use_store` and `setup` first.

    Generating, pulling and reading weights take turns: a call that comes after a pull is answered
    by the pulled weights, or, if the pull failed, by the old ones, and every completion says by
    which.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        *,
        model_dir: Path,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self._config = config
        self._model_dir = model_dir
        self._dtype = dtype
        self._seed = seed
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="generator")
        self._turn = asyncio.Lock()
        self._phase = "starting"
        self._version = WeightsVersion(epoch=0, policy_version=0)
        self._pull: TransferStatus | None = None
        self._store: WeightStore | None = None
        self._torn: str | None = None
        self._num_completions = 0

    async def setup(self) -> None:
        """Load tokenizer and model; the directory's weights are policy version 0."""
        await self._run("setup", self._load)

    def _load(self) -> None:
        self._device = resolve_device(self._config.device)
        self._tokenizer = load_tokenizer(self._model_dir)
        self._tokenizer.padding_side = "left"
        self._model: Any = load_causal_lm(self._model_dir, dtype=self._dtype, device=self._device)
        found = unique_tensors(self._model)
        self._tensors = {name: tensor for name, (tensor, _) in found.items()}
        self._tied = {name: tied for name, (_, tied) in found.items()}
        self._stop_ids = _stop_token_ids(self._model.generation_config, self._tokenizer)
        # Nothing of the directory's sampling defaults may survive: they would make the log-probs
        # those of another distribution.
        self._model.generation_config = GenerationConfig()
        with torch.random.fork_rng():
            torch.manual_seed(self._seed)
            self._rng_states = _get_rng_states(self._device)

    async def generate(
        self, prompts: Sequence[str], sampling: SamplingParams
    ) -> list[list[Completion]]:
        """`sampling.num_completions` completions for every prompt.

        Raises:
            DataError: a prompt is empty or too long, or its completion would not fit.
            WeightsError: the last pull failed half way.
        """
        async with self._turn:
            self._require_whole()
            return await self._run("generate", lambda: self._generate(prompts, sampling))

    def _require_whole(self) -> None:
        if self._torn is not None:
            raise WeightsError(self._torn)

    def _generate(self, prompts: Sequence[str], sampling: SamplingParams) -> list[list[Completion]]:
        prompt_ids = [self._encode(prompt, sampling) for prompt in prompts]
        G = sampling.num_completions
        rows = [ids for ids in prompt_ids for _ in range(G)]
        size = self._config.batch_size
        completions: list[Completion] = []
        with torch.random.fork_rng():
            _set_rng_states(self._rng_states)
            for start in range(0, len(rows), size):
                completions += self._sample(rows[start : start + size], sampling)
            self._rng_states = _get_rng_states(self._device)
        self._num_completions += len(completions)
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
    def _sample(self, rows: list[list[int]], sampling: SamplingParams) -> list[Completion]:
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
        )
        new_ids_BT = output.sequences[:, padded["input_ids"].shape[1] :]
        logits_BTV = torch.stack(output.logits, dim=1).float() / sampling.temperature
        logprobs_BT = torch.log_softmax(logits_BTV, dim=-1).gather(-1, new_ids_BT[..., None])
        return [
            self._completion(prompt, ids, logprobs, sampling.temperature)
            for prompt, ids, logprobs in zip(
                rows, new_ids_BT.tolist(), logprobs_BT.squeeze(-1).tolist(), strict=True
            )
        ]

    def _completion(
        self, prompt: list[int], ids: list[int], logprobs: list[float], temperature: float
    ) -> Completion:
        stop = next((t for t, token in enumerate(ids) if token in self._stop_ids), None)
        length = len(ids) if stop is None else stop + 1
        return Completion(
            prompt_token_ids=tuple(prompt),
            token_ids=tuple(ids[:length]),
            logprobs=tuple(logprobs[:length]),
            text=str(self._tokenizer.decode(ids[:length], skip_special_tokens=True)),
            policy_version=self._version.policy_version,
            temperature=temperature,
            stopped=stop is not None,
        )

    def use_store(self, store: WeightStore) -> None:
        """Pull from this store from now on."""
        self._store = store

    async def pull_weights(self, ref: WeightsRef | WeightsVersion | None = None) -> WeightsVersion:
        """Load a published version in place, after all of it has arrived and been checked.

        Without a version, the newest one.

        Raises:
            WeightsError: older than the one in use, missing, or not whole; the old weights stay.
            TornWeightsError: copying failed half way; generating is refused until a pull succeeds.
        """
        async with self._turn:
            return await to_the_end(self._pull_weights(ref))

    async def _pull_weights(self, ref: WeightsRef | WeightsVersion | None) -> WeightsVersion:
        wanted = ref.version if isinstance(ref, WeightsRef) else ref
        if wanted is not None and wanted < self._version:
            raise WeightsError(f"weights {wanted} are older than {self._version}, in use")
        if self._store is None:
            raise WeightsError("this generator has no store to pull from; call use_store first")
        start = time.perf_counter()
        async with self._store.reading(wanted) as reading:
            version = reading.manifest.version
            if version < self._version:
                raise WeightsError(f"weights {version} are older than {self._version}, in use")
            try:
                await reading.load_into(self._tensors)
            except TornWeightsError as error:
                self._torn = str(error)
                raise
            self._version, self._torn = version, None
            self._pull = TransferStatus(num_bytes_of(reading.manifest), time.perf_counter() - start)
        return version

    async def weight_checksums(self) -> WeightChecksums:
        """The version in use, and a checksum of every tensor.

        Raises:
            WeightsError: the last pull failed half way.
        """
        async with self._turn:
            self._require_whole()
            return await self._run("weight_checksums", self._checksums)

    def _checksums(self) -> WeightChecksums:
        tensors: dict[str, TensorFacts] = {}
        for name, tensor in self._tensors.items():
            tensors[name] = describe_tensor(tensor.detach().cpu(), self._tied[name])
        return WeightChecksums(self._version, tensors)

    async def read_weight(self, name: str) -> Tensor:
        """A copy on the CPU of a tensor in use, by any of its names.

        Raises:
            WeightsError: there is no such tensor, or the last pull failed half way.
        """
        async with self._turn:
            self._require_whole()
            return await self._run("read_weight", lambda: self._read_weight(name))

    def _read_weight(self, name: str) -> Tensor:
        for first, tied in self._tied.items():
            if name in (first, *tied):
                return self._tensors[first].detach().to("cpu", copy=True)
        raise WeightsError(
            f"the generator's model has no tensor {name!r}; weight_checksums names those it has"
        )

    async def get_status(self) -> GeneratorStatus:
        return GeneratorStatus(
            version=self._version,
            pull=self._pull,
            phase=self._phase,
            num_completions=self._num_completions,
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    async def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._store is not None:
            self._store.close()

    async def _run(self, phase: str, work: Callable[[], T]) -> T:
        self._phase = phase
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._phase = "idle"


def _stop_token_ids(generation: GenerationConfig, tokenizer: Any) -> list[int]:
    """The directory's stop tokens, with the tokenizer's own end of sequence."""
    configured = generation.eos_token_id
    ids = set(configured if isinstance(configured, list) else [configured])
    return sorted(token for token in ids | {tokenizer.eos_token_id} if token is not None)


def _get_rng_states(device: torch.device) -> tuple[Tensor, Tensor | None]:
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_gpu


def _set_rng_states(states: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])
