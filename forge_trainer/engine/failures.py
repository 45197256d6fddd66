"""What an exception on a rank means: a collective that others broke, or memory that ran out."""

from __future__ import annotations

import torch

MEMORY_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory")
CONNECTION_SIGNS = ("gloo", "connection closed by peer", "connection reset by peer")
NEEDS_LESS_MEMORY = (
    "make packing.max_row_tokens, packing.rows_per_microbatch or logprob_chunk_tokens smaller, "
    "switch on activation_checkpointing, or shard over more ranks"
)


def is_out_of_memory(error: BaseException) -> bool:
    """True if the device or the host had no more, also where NCCL or the C library says so."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _has(error, MEMORY_SIGNS)


def is_collective_failure(error: BaseException) -> bool:
    """True if a collective broke because another rank is gone or late."""
    if is_out_of_memory(error):
        return False
    if isinstance(error, torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and _has(error, CONNECTION_SIGNS)


def describe(error: BaseException, *, rank: int, phase: str) -> str:
    """One text for the user: what went wrong, and for memory what to do about it.

    Example: "out of memory on rank 3 in forward_backward: CUDA out of memory. Tried to allocate
    2.00 GiB ...; make packing.max_row_tokens, ... smaller, ..."
    """
    if is_out_of_memory(error):
        numbers = str(error) or type(error).__name__
        return f"out of memory on rank {rank} in {phase}: {numbers}; {NEEDS_LESS_MEMORY}"
    return f"{type(error).__name__}: {error}"


def _has(error: BaseException, signs: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(sign in text for sign in signs)
