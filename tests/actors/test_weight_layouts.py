"""Weights go out and come in whole whatever the shards are: of the trainer, and of the reader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forge_trainer.config import PackingConfig, ParallelConfig, TinyModelConfig, TrainerConfig
from forge_trainer.errors import WeightsError
from forge_trainer.functional.pieces.manifests import (
    build_manifest,
    num_bytes_of,
    tensors_of,
    ties_of,
)
from forge_trainer.hf import create_tiny_model, load_weights
from forge_trainer.pieces import WeightPiece
from forge_trainer.types import World
from forge_trainer.weights.shared_memory.folder import shared_folder
from forge_trainer.weights.shared_memory.store import SharedMemoryWeightStore
from tests.ranks import RankPool
from tests.weights import V0, publish, read_all

LAYOUTS = {
    "one": (1, ParallelConfig()),
    "fsdp2": (2, ParallelConfig()),
    "fsdp4": (4, ParallelConfig()),
    "hsdp": (4, ParallelConfig(data_replicate=2)),
    "tp2": (2, ParallelConfig(tensor=2)),
    "pp2": (2, ParallelConfig(pipeline=2)),
    "fsdp2_tp2": (4, ParallelConfig(tensor=2)),
    "fsdp2_pp2": (4, ParallelConfig(pipeline=2)),
}
CASES = [
    *(("llama", layout) for layout in LAYOUTS),
    *(("qwen3_tied", layout) for layout in LAYOUTS if "pp" not in layout),
    *(("llama_9_3", layout) for layout in ("fsdp2", "fsdp4")),
    *(("llama_2_heads", layout) for layout in ("fsdp2", "fsdp4", "tp2", "hsdp")),
    # 13 rows on 4 ranks: shards of 4, 4, 4 and 1; with 3, one is empty.
    *(("uneven", layout) for layout in ("fsdp2", "fsdp4")),
]


def _tiny(architecture: str, heads: int, kv_heads: int, **options: Any) -> TinyModelConfig:
    sizes: dict[str, Any] = {"hidden_size": 16 * heads, "intermediate_size": 32, "num_layers": 2}
    return TinyModelConfig(
        architecture=architecture,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=16,
        max_sequence_tokens=32,
        **(sizes | options),
    )


MODELS = {
    "llama": _tiny("llama", 4, 2, tie_embeddings=False),
    "qwen3_tied": _tiny("qwen3", 4, 2),
    "llama_9_3": _tiny("llama", 9, 3, tie_embeddings=False),
    "llama_2_heads": _tiny("llama", 2, 2, tie_embeddings=False),
    "uneven": _tiny("qwen3", 2, 2, hidden_size=3, intermediate_size=13, tie_embeddings=False),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: create_tiny_model(tmp_path_factory.mktemp(name), tiny, seed=0)
        for name, tiny in MODELS.items()
    }


def _push(rank: int, layout: str, model_dir: Path, folder: Path) -> Any:
    """This rank's part of version 0."""
    from forge_trainer.engine.titan.engine import TitanEngine

    size, parallel = LAYOUTS[layout]
    config = TrainerConfig(
        device="cpu",
        num_ranks=size,
        parallel=parallel,
        packing=PackingConfig(max_row_tokens=32, rows_per_microbatch=2),
    )
    engine = TitanEngine(config, model_dir, World(rank, rank, size))
    engine.setup()
    store = SharedMemoryWeightStore(folder)
    staged = store.stage(V0, rank, engine.weight_pieces(dtype=torch.float32))
    part = asyncio.run(store.write(staged))
    engine.close()
    store.close()
    return part


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_pushed_weights_are_those_of_the_directory(
    pool: RankPool, models: dict[str, Path], model: str, layout: str
) -> None:
    wanted = load_weights(models[model])
    with shared_folder() as folder:
        parts = pool.run(LAYOUTS[layout][0], _push, layout, models[model], folder)
        store = SharedMemoryWeightStore(folder)
        manifest = build_manifest(V0, store.transport, parts)
        asyncio.run(store.commit(manifest))
        _, found = asyncio.run(read_all(store))
        store.close()
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    # Nothing twice, however many ranks hold it.
    assert num_bytes_of(manifest) == sum(tensor.nbytes for tensor in wanted.values())
    is_tied = MODELS[model].tie_embeddings
    assert ties_of(manifest) == ({"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {})
    assert len(tensors_of(manifest)) == len(wanted)


FULL = torch.arange(5 * 7.0).reshape(5, 7)
EXPERTS = {f"experts.{i}": FULL + i for i in range(3)}


def _read_sharded(rank: int, folder: Path) -> dict[str, Tensor]:
    """What this rank's shards hold after a read, over a mesh of the reader's own."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
    found: dict[str, Tensor] = {}

    async def read() -> None:
        async with store.reading() as reading:
            for kind, placement in placements.items():
                shards = {
                    name: zeros(5, 7, device_mesh=mesh, placements=[placement])
                    for name in ("w", *EXPERTS)
                }
                await reading.load_into(shards)
                for name, shard in shards.items():
                    assert isinstance(shard, DTensor)
                    found[f"{kind}.{name}"] = shard.full_tensor()

    store = SharedMemoryWeightStore(folder)
    asyncio.run(read())
    store.close()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_reader_gets_the_shards_of_a_layout_of_its_own(pool: RankPool, size: int) -> None:
    """From two ranks' uneven rows and one rank's experts, into rows, columns and copies."""

    def piece(name: str, tensor: Tensor, start: int = 0) -> WeightPiece:
        return WeightPiece(name, (5, 7), (start, 0), tensor, torch.float32)

    by_rank = [
        [piece("w", FULL[:3]), *(piece(name, EXPERTS[name]) for name in list(EXPERTS)[:2])],
        [piece("w", FULL[3:], 3), *(piece(name, EXPERTS[name]) for name in list(EXPERTS)[2:])],
    ]
    with shared_folder() as folder:
        store = SharedMemoryWeightStore(folder)
        asyncio.run(publish(store, V0, by_rank))
        answers = pool.run(size, _read_sharded, folder)
        store.close()
    for found in answers:
        assert len(found) == 12
        for name, tensor in found.items():
            wanted = ({"w": FULL} | EXPERTS)[name.partition(".")[2]]
            assert torch.equal(tensor, wanted), name


def _refused(rank: int, folder: Path) -> list[str]:
    """What is said of destinations that are no rectangles."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial
    from torch.distributed.tensor.placement_types import _StridedShard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.zeros(5, 7), mesh, [Partial()])
    strided = DTensor.from_local(torch.zeros(2, 7), mesh, [_StridedShard(0, split_factor=2)])
    messages: list[str] = []

    async def read() -> None:
        async with store.reading() as reading:
            for tensor in (partial, strided):
                try:
                    await reading.read_into({"w": tensor})
                except WeightsError as error:
                    messages.append(str(error))

    store = SharedMemoryWeightStore(folder)
    asyncio.run(read())
    store.close()
    return messages


def test_shards_that_are_no_rectangles_are_refused(pool: RankPool) -> None:
    by_rank = [
        [WeightPiece(name, tuple(t.shape), (0, 0), t, torch.float32)]
        for name, t in {"w": FULL, "v": FULL[:4]}.items()
    ]
    with shared_folder() as folder:
        store = SharedMemoryWeightStore(folder)
        asyncio.run(publish(store, V0, by_rank))
        for messages in pool.run(2, _refused, folder):
            assert "w is a partial sum over ranks" in messages[0]
            assert "w " in messages[1]
        store.close()
