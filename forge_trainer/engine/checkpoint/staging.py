"""Copies of a state dict on the host, in memory that is kept for the next one.

torch's DefaultStager does the same at half the speed where tensors are a few MB each: it copies
every tensor's layout and mesh by reflection (`python -m apps.bench.main --suite checkpoint`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

State = dict[str, Any]
Keys = tuple[str, ...]
"""Where a value lies in nested dicts."""


class Staging:
    """Only the first copy pays for fresh memory, which is pinned where there is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[Keys, Tensor] = {}

    def copy(self, state: State) -> State:
        """Equal to `state`, sharing nothing with it; valid until the next copy."""
        copied: State = self._copy((), state)
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return copied

    def _copy(self, keys: Keys, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._copy((*keys, key), inner) for key, inner in value.items()}
        if isinstance(value, DTensor):
            local = self._copy_tensor(keys, value.to_local())
            # from_local would move the copy to the mesh's device.
            return DTensor(local, value._spec, requires_grad=False)
        if isinstance(value, Tensor):
            return self._copy_tensor(keys, value)
        return copy.deepcopy(value)

    def _copy_tensor(self, keys: Keys, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(keys)
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            pinned = self._device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._buffers[keys] = buffer
        return buffer.copy_(tensor.detach(), non_blocking=True)

    def close(self) -> None:
        """Free the memory."""
        self._buffers.clear()
