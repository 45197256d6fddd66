"""Completions of 1 to 64 tokens and of 64 tokens each, against batches of transformers' `generate`.

A batch of `generate` ends with its longest row. Both sides give a log-prob per token.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apps.bench.measure import Measure, Row, interleaved, ratios
from forge_trainer.config import GeneratorConfig, TinyModelConfig, WeightsConfig
from forge_trainer.generation import make_backend
from forge_trainer.generation.transformers.backend import TransformersBackend
from forge_trainer.hf import create_tiny_model, load_causal_lm
from forge_trainer.types import GenerationRequest, SamplingParams

MODEL = TinyModelConfig(
    hidden_size=192, intermediate_size=768, num_layers=2, num_heads=6, num_kv_heads=6
)
PROMPT_TOKENS, LONGEST, SLOTS, ROUNDS = 8, 64, 64, 7


async def rows() -> list[Row]:
    """Seconds of ours over seconds of `generate` for the same tokens, with 64 rows at one time."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    ragged: list[int] = random.integers(1, LONGEST + 1, 4 * SLOTS).tolist()
    work = {"equal": [LONGEST] * SLOTS, "ragged": ragged}
    meaning = {
        "equal": f"{SLOTS} completions of {LONGEST} tokens, seconds / those of generate",
        "ragged": f"{4 * SLOTS} completions of 1 to {LONGEST} tokens, the same",
    }
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = create_tiny_model(Path(scratch), MODEL, seed=0)
        ours, theirs = _ours(model_dir), _theirs(model_dir)
        for name, lengths in work.items():
            pairs = await interleaved(_timed(ours, lengths), _timed(theirs, lengths), rounds=ROUNDS)
            bar = 1.1 if name == "equal" else 1.0
            found.append(Row(f"{name}_over_generate", meaning[name], ratios(pairs), bar))
    return found


def _ours(model_dir: Path) -> Callable[[Sequence[int]], None]:
    config = GeneratorConfig(device="cpu", max_prompt_tokens=64, batch_size=SLOTS)
    backend = make_backend(config, WeightsConfig(), model_dir=model_dir)
    assert isinstance(backend, TransformersBackend)
    backend.load()
    # Nothing ends before its length.
    backend._stop_ids = frozenset()

    def complete(lengths: Sequence[int]) -> None:
        waiting = [
            GenerationRequest(prompt, SamplingParams(length), seed=seed)
            for seed, (prompt, length) in enumerate(zip(_prompts(lengths), lengths, strict=True))
        ]
        while waiting or backend.num_unfinished:
            free = SLOTS - backend.num_unfinished
            # As `Serving` refills slots.
            if free >= min(len(waiting), SLOTS // 8):
                for request in waiting[:free]:
                    backend.add(request)
                waiting = waiting[free:]
            backend.step()

    return complete


def _theirs(model_dir: Path) -> Callable[[Sequence[int]], None]:
    """In the order in which they come."""
    model: Any = load_causal_lm(model_dir, dtype=torch.float32, device=torch.device("cpu"))
    model.generation_config.eos_token_id = None

    def complete(lengths: Sequence[int]) -> None:
        prompts = torch.tensor(_prompts(lengths))
        for start in range(0, len(lengths), SLOTS):
            batch = prompts[start : start + SLOTS]
            output = model.generate(
                input_ids=batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                top_k=0,
                max_new_tokens=max(lengths[start : start + SLOTS]),
                return_dict_in_generate=True,
                output_logits=True,
            )
            sampled = output.sequences[:, PROMPT_TOKENS:, None]
            torch.log_softmax(torch.stack(output.logits, dim=1), dim=-1).gather(-1, sampled)

    return complete


def _prompts(lengths: Sequence[int]) -> list[list[int]]:
    random = np.random.default_rng(len(lengths))
    found: list[list[int]] = random.integers(4, 250, (len(lengths), PROMPT_TOKENS)).tolist()
    return found


def _timed(complete: Callable[[Sequence[int]], None], lengths: Sequence[int]) -> Measure:
    async def measure() -> float:
        start = time.perf_counter()
        complete(lengths)
        return time.perf_counter() - start

    return measure
