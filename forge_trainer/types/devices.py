"""What a host has to compute with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    """As CUDA_VISIBLE_DEVICES takes it: an index or a UUID."""
    model: str | None = None
    memory_bytes: int | None = None
    """None: not known from here, as for capability."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability."""


@dataclass(frozen=True, slots=True)
class HostInventory:
    """Of each host of a run: they are taken to be alike."""

    gpus: tuple[Gpu, ...] = ()
    cores: int | None = None
    """None: not known from here, as for memory_bytes."""
    memory_bytes: int | None = None
