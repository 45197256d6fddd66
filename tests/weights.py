"""Small versions of weights, made by hand, for tests of stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from forge_trainer.functional.pieces.manifests import build_manifest, tensors_of
from forge_trainer.pieces import Manifest, WeightPiece, WeightsVersion
from forge_trainer.protocols import Engine, WeightStore

V0, V1, V2 = (WeightsVersion(0, step) for step in range(3))


def model(fill: float = 0.0) -> dict[str, Tensor]:
    """A matrix, a vector, a number and a buffer; `fill` tells versions apart."""
    return {
        "matrix": torch.arange(42.0).reshape(6, 7) + fill,
        "vector": torch.arange(5.0) - fill,
        "number": torch.tensor(2.5 + fill),
        "buffer": torch.arange(3) + int(fill),
    }


def pieces_of(tensors: Mapping[str, Tensor], rank: int = 0, size: int = 1) -> list[WeightPiece]:
    """Rows of matrices spread unevenly over ranks, all else from the first; an empty shard none."""
    pieces = []
    for name, tensor in tensors.items():
        published = torch.float32 if tensor.is_floating_point() else tensor.dtype
        if tensor.dim() < 2:
            if rank == 0:
                offsets = (0,) * tensor.dim()
                pieces.append(WeightPiece(name, tuple(tensor.shape), offsets, tensor, published))
            continue
        rows = -(-tensor.shape[0] // size)
        own = tensor[rank * rows : (rank + 1) * rows]
        if own.numel():
            pieces.append(WeightPiece(name, tuple(tensor.shape), (rank * rows, 0), own, published))
    return pieces


async def publish(
    store: WeightStore, version: WeightsVersion, by_rank: Sequence[Sequence[WeightPiece]]
) -> Manifest:
    """What a trainer does, one rank after the other in this process."""
    parts = [
        await store.write(store.stage(version, rank, pieces)) for rank, pieces in enumerate(by_rank)
    ]
    manifest = build_manifest(version, store.transport, parts)
    await store.commit(manifest)
    return manifest


async def read_all(
    store: WeightStore, version: WeightsVersion | None = None
) -> tuple[WeightsVersion, dict[str, Tensor]]:
    """The version, the newest by default, tensor by tensor."""
    async with store.reading(version) as reading:
        names = tensors_of(reading.manifest)
        return reading.manifest.version, {name: await reading.read(name) for name in names}


def published_by(engine: Engine, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What an engine of one rank would publish."""
    return {
        piece.name: piece.data.to("cpu", piece.dtype, copy=True)
        for piece in engine.weight_pieces(dtype=dtype)
    }
