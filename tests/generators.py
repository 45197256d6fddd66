"""A generator over a real backend, with weights made by hand and a full forward to compare with."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from forge_trainer.config import GeneratorConfig, TinyModelConfig
from forge_trainer.generation import ModelGenerator
from forge_trainer.hf import load_causal_lm, load_tokenizer, unique_tensors
from forge_trainer.pieces import WeightsVersion
from forge_trainer.types import Completion, GenerationRequest, SamplingParams
from forge_trainer.types.arrays import as_array
from forge_trainer.weights.memory import MemoryWeightStore
from tests.waiting import Gate
from tests.weights import pieces_of, publish

MODEL = TinyModelConfig(
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_sequence_tokens=128,
)
CONFIG = GeneratorConfig(
    device="cpu", batch_size=4, max_prompt_tokens=40, max_completion_tokens=64, seed=0
)


def request(
    prompt: Sequence[int] = (20, 21, 22),
    max_completion_tokens: int = 8,
    *,
    seed: int = 0,
    **how: Any,
) -> GenerationRequest:
    """One, whose prompt is token ids."""
    return GenerationRequest(list(prompt), SamplingParams(max_completion_tokens, **how), seed=seed)


def ragged_requests(number: int, *, longest: int = 40, **how: Any) -> list[GenerationRequest]:
    """Of many prompts and lengths; some prompts are equal."""
    rng = np.random.default_rng(number)
    prompts = [rng.integers(4, 250, rng.integers(1, 40)).tolist() for _ in range(number)]
    return [
        request(prompts[seed // 2], int(rng.integers(1, longest + 1)), seed=seed, **how)
        for seed in range(number)
    ]


@dataclasses.dataclass
class Subject:
    """A generator whose every version of weights is known."""

    generator: ModelGenerator
    store: MemoryWeightStore
    model_dir: Path
    runner: asyncio.Runner
    tolerance: float
    """How far log-probs may be from those of a full forward."""

    def __post_init__(self) -> None:
        self._models: dict[int, Any] = {}
        self._version = 0
        self.tokenizer = load_tokenizer(self.model_dir)

    @property
    def backend(self) -> Any:
        return self.generator._backend

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    async def all_of(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Their completions, asked for at one time."""
        return await asyncio.gather(*[self.generator.generate_one(one) for one in requests])

    async def publish(self) -> WeightsVersion:
        """Other weights than all before, in the store."""
        self._version += 1
        version = WeightsVersion(0, self._version)
        found = unique_tensors(self._model(self._version))
        tensors = {name: tensor.detach() for name, (tensor, _) in found.items()}
        await publish(self.store, version, [pieces_of(tensors)])
        return version

    def _model(self, policy_version: int) -> Any:
        """That of transformers with the weights of a version; 0 is the directory's."""
        if policy_version not in self._models:
            model: Any = load_causal_lm(
                self.model_dir, dtype=torch.float32, device=torch.device("cpu")
            )
            random = torch.Generator().manual_seed(policy_version)
            for parameter in model.parameters() if policy_version else ():
                noise = torch.randn(parameter.shape, generator=random)
                parameter.data += 0.1 * noise
            self._models[policy_version] = model
        return self._models[policy_version]

    @torch.no_grad()
    def full_forward(self, completion: Completion, policy_version: int) -> Tensor:
        """[completion tokens, V] log-probs at its temperature, without any cache."""
        prompt, sampled = as_array(completion.prompt_token_ids), as_array(completion.token_ids)
        ids = torch.from_numpy(np.concatenate([prompt, sampled])).long()[None]
        logits_TV = self._model(policy_version)(ids).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits_TV.float() / completion.temperature, dim=-1)

    def gaps(self, completion: Completion) -> NDArray[np.float32]:
        """How far each log-prob is from that of its own version."""
        ids = torch.from_numpy(as_array(completion.token_ids)).long()[:, None]
        wanted = np.zeros(len(ids), np.float32)
        versions = as_array(completion.policy_versions)
        for version in np.unique(versions):
            full = self.full_forward(completion, int(version)).gather(1, ids).squeeze(1)
            wanted = np.where(versions == version, full.numpy(), wanted)
        gaps: NDArray[np.float32] = np.abs(wanted - as_array(completion.logprobs))
        return gaps

    def require_exact(self, completions: Sequence[Completion]) -> None:
        """All log-probs are those of a full forward."""
        for completion in completions:
            assert self.gaps(completion).max() <= self.tolerance

    @contextlib.contextmanager
    def using(self, **config: Any) -> Iterator[None]:
        """Another config of the generator, over the same backend."""
        with pytest.MonkeyPatch.context() as patched:
            changed = self.generator._config.model_copy(update=config)
            patched.setattr(self.generator, "_config", changed)
            yield

    @contextlib.asynccontextmanager
    async def paused_after(self, num_steps: int) -> AsyncIterator[Any]:
        """What is asked for inside runs for so many steps; calling `reached()` waits for that."""
        gate, steps, step = Gate(), 0, self.backend.step

        def counted() -> Any:
            nonlocal steps
            steps += 1
            if steps == num_steps:
                gate.pass_through()
            return step()

        async def reached() -> None:
            await gate.reached()
            pausing = asyncio.create_task(self.generator.pause(), name="pause")
            await asyncio.sleep(0)
            gate.open()
            await pausing
            assert steps == num_steps

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(self.backend, "step", counted)
            try:
                yield reached
            finally:
                gate.open()
                await self.generator.resume()
