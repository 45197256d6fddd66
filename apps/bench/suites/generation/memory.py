"""Memory of sampling beyond the model and its cache of keys and values, over one step's logits.

Every allocation of torch is followed, so that nothing but the step is measured.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from apps.bench.measure import Row, Spread
from forge_trainer.config import GeneratorConfig, TinyModelConfig, WeightsConfig
from forge_trainer.generation import make_backend
from forge_trainer.generation.transformers.backend import TransformersBackend
from forge_trainer.hf import create_tiny_model, load_weights
from forge_trainer.types import GenerationRequest, SamplingParams

VOCABULARY, HIDDEN, ROWS = 128_000, 64, 32
"""Wide in the vocabulary alone, so that logits are what memory goes to."""
PROMPT_TOKENS, STEPS = 8, 9
EMBEDDING = "model.embed_tokens.weight"


def rows() -> list[Row]:
    """The first step computes all prompts, equal ones once; the others are steps of decoding."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        backend = _backend(_wide_model(Path(scratch)))
        logits = 4 * ROWS * VOCABULARY
        for seed in range(ROWS):
            prompt = [20 + seed // 2] * PROMPT_TOKENS
            backend.add(GenerationRequest(prompt, SamplingParams(STEPS + 2), seed=seed))
        peak, left = peak_bytes(backend.step)
        # What stays is the cache of keys and values.
        first = (peak - left) / logits
        others = [peak_bytes(backend.step)[0] / logits for _ in range(STEPS)]
    what = f"peak beyond model and cache / logits of {ROWS} x {VOCABULARY} in float32"
    return [
        Row("prefill_memory_over_logits", f"{what}, prompts", Spread.of([first]), bar=1.2),
        Row("decode_memory_over_logits", f"{what}, decoding", Spread.of(others), bar=1.2),
    ]


def peak_bytes(work: Callable[[], object]) -> tuple[int, int]:
    """What `work` allocated on the CPU: at the peak beyond what was there, and in the end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    recorded = profiler.profiler
    assert recorded is not None
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = list(itertools.accumulate((event.nbytes() for event in events), initial=0))
    return max(held), held[-1]


def _backend(model_dir: Path) -> TransformersBackend:
    config = GeneratorConfig(device="cpu", max_prompt_tokens=64)
    backend = make_backend(config, WeightsConfig(), model_dir=model_dir)
    assert isinstance(backend, TransformersBackend)
    backend.load()
    # Nothing ends before its length.
    backend._stop_ids = frozenset()
    return backend


def _wide_model(folder: Path) -> Path:
    """A tiny model whose vocabulary is as large as a real one's."""
    tiny = TinyModelConfig(
        hidden_size=HIDDEN, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=2
    )
    create_tiny_model(folder, tiny, seed=0)
    weights = load_weights(folder)
    weights[EMBEDDING] = torch.randn(VOCABULARY, HIDDEN) / HIDDEN**0.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocab_size": VOCABULARY}))
    return folder
