"""A copy of a model's weights in memory that other processes can map: a pull fills it, and vLLM's
workers load what it then holds. Imports no vLLM.

The memory has no name in the file system, so that nothing is left behind by a process that is
killed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forge_trainer.errors import WeightsError
from forge_trainer.functional.pieces.manifests import describe_tensor
from forge_trainer.hf import unique_tensors
from forge_trainer.pieces import TensorFacts

ALIGNMENT = 64
"""Every tensor begins at a multiple of it, in bytes."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class StagingAddress:
    """How a process of this host maps the copy; plain values, which any queue takes."""

    path: str
    num_bytes: int
    slots: tuple[Slot, ...]

    def map(self) -> dict[str, Tensor]:
        """The tensors, in the memory of whoever made them."""
        memory = torch.from_file(self.path, shared=True, size=self.num_bytes, dtype=torch.uint8)
        return {slot.name: _view(memory, slot) for slot in self.slots}


class Staging:
    """All tensors of a model of transformers, by first name."""

    def __init__(self, model: nn.Module) -> None:
        found = unique_tensors(model)
        slots, num_bytes = _lay_out({name: tensor for name, (tensor, _) in found.items()})
        self._file = os.memfd_create("forge_trainer-staging", os.MFD_CLOEXEC)
        os.ftruncate(self._file, num_bytes)
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.address = StagingAddress(path, num_bytes, slots)
        self.tensors = self.address.map()
        self._tied = {name: tied for name, (_, tied) in found.items()}
        for name, (tensor, _) in found.items():
            self.tensors[name].copy_(tensor.detach())

    def checksums(self) -> dict[str, TensorFacts]:
        """What it holds, by name."""
        return {
            name: describe_tensor(tensor, self._tied[name]) for name, tensor in self.tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """A copy of a tensor, by any of its names.

        Raises:
            WeightsError: there is no such tensor.
        """
        for first, tied in self._tied.items():
            if name in (first, *tied):
                return self.tensors[first].clone()
        raise WeightsError(
            f"the generator's model has no tensor {name!r}; weight_checksums names those it has"
        )

    def close(self) -> None:
        """Give the memory back, once nobody maps it any more."""
        self.tensors = {}
        os.close(self._file)


def _lay_out(tensors: Mapping[str, Tensor]) -> tuple[tuple[Slot, ...], int]:
    slots: list[Slot] = []
    end = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        slots.append(Slot(name, dtype, tuple(tensor.shape), end))
        size = tensor.numel() * tensor.element_size()
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(slots), end


def _view(memory: Tensor, slot: Slot) -> Tensor:
    dtype: torch.dtype = getattr(torch, slot.dtype)
    size = torch.Size(slot.shape).numel() * dtype.itemsize
    return memory[slot.offset : slot.offset + size].view(dtype).view(slot.shape)
