"""What a generator that vLLM runs can be told besides."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from ..section import Section


class VllmConfig(Section):
    kv_cache_gb: PositiveFloat | None = None
    """Of memory for keys and values, in each GPU; None takes 1 GB on the CPU, and of a GPU what
    gpu_memory_utilization leaves. Completions that find no room wait."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Fraction of a GPU that weights, keys and values may fill together. Lower it for one that is
    shared (placement.colocate)."""
    block_size: Literal[32, 64, 128] | None = None
    """Tokens in a block of keys and values: prompts that begin alike share whole blocks. None
    takes vLLM's, 128 on the CPU."""
    enforce_eager: bool | None = None
    """Without compiling and CUDA graphs; None is true on the CPU, where compiling takes minutes."""
