"""What TitanEngine's ranks sum or agree on outside of the model."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed import ParallelDims

from forge_trainer.types import World

from ..update import Counts


class Collectives:
    """The ranks of one training group.

    Every method but `coordinate`, `bound` and `abort` is a collective of all.
    """

    def __init__(self, parallel_dims: ParallelDims, device: torch.device, world: World) -> None:
        self._parallel_dims = parallel_dims
        self._device = device
        self._world = world
        self._timeout_s: float | None = None

    def bound(self, timeout_s: float) -> None:
        """From here on, a collective that takes longer is broken."""
        if timeout_s == self._timeout_s:
            return
        self._timeout_s = timeout_s
        for group in (dist.group.WORLD, *(mesh.get_group() for mesh in self._meshes())):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)

    def abort(self) -> None:
        """End every process group of this process at once, also those that still have work.

        On NCCL this interrupts kernels. On gloo connections last for as long as somebody holds the
        group; meshes no longer do, although DTensor's caches hold meshes.
        """
        # torch 2.13.0 has no public way that does not wait for the others.
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()
        for mesh in self._meshes():
            for holder in (mesh, mesh._get_root_mesh()):
                holder._pg_registry.clear()

    def _meshes(self) -> list[DeviceMesh]:
        """One for each axis."""
        return list(self._parallel_dims.get_all_one_dimensional_meshes().values())

    def coordinate(self, axis: str) -> int:
        """This rank's index on a mesh axis; 0 where there is no such axis."""
        mesh = self._parallel_dims.get_optional_mesh(axis)
        return 0 if mesh is None else int(mesh.get_local_rank())

    def reduce_counts(self, counts: Counts) -> Counts:
        """Summed over data-parallel ranks only: other axes see the same tokens."""
        mesh = self._parallel_dims.get_optional_mesh("batch")
        if mesh is None:
            return counts
        total = torch.tensor([counts.sequences, counts.tokens], device=self._device)
        dist.all_reduce(total, group=mesh.get_group())
        sequences, tokens = total.tolist()
        return Counts(int(sequences), int(tokens))

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """In place."""
        dist.all_reduce(value)
        return value

    def first_error(self, own: str | None) -> tuple[int, str | None]:
        """The lowest rank with an error and its text, the same on all ranks."""
        if self._world.size == 1:
            return self._world.rank, own
        flag = torch.tensor(int(own is not None), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not flag.item():
            return self._world.rank, None
        errors: list[str | None] = [None] * self._world.size
        dist.all_gather_object(errors, own)
        return next((rank, error) for rank, error in enumerate(errors) if error is not None)
