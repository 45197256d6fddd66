"""What completes prompts."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from .section import Section, Seed

CUTS_OFF_TOKENS = (
    "completions would come from a part of the vocabulary, whose probabilities are scaled up, "
    "while the trainer's are those of the whole, so every importance ratio would be wrong by the "
    "part's share; leave it out, and use temperature, which both sides know"
)
REFUSED_SAMPLING = dict.fromkeys(("top_p", "top_k", "min_p"), CUTS_OFF_TOKENS)
"""What others sample with and we do not, and why."""


class GeneratorConfig(Section):
    refused: ClassVar[dict[str, str]] = REFUSED_SAMPLING
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None
    """What it runs in; None takes weights.dtype, and nothing else can be pulled."""
    max_prompt_tokens: PositiveInt = 128
    max_completion_tokens: PositiveInt = 16
    temperature: Annotated[float, Field(ge=1e-3, le=1e6)] = 1.0
    seed: Seed | None = None
    """Of sampling; None takes run.seed."""
    batch_size: PositiveInt = 256
    """Completions sampled at one time."""
    cpu_threads: PositiveInt | None = None
    """Threads of its computations on the CPU; None is a fair share of the host's cores."""
