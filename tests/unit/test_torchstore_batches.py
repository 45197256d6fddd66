"""What volumes and index of a torchstore do with many pieces, without their processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_trainer.processes.meshes import prepare_controller
from forge_trainer.processes.torchstore_batches import (
    announce,
    drop_pieces,
    forget,
    name_pieces,
    piece_locations,
    read_pieces,
    write_pieces,
)


@pytest.fixture(autouse=True)
def prepared() -> None:
    """Before torchstore is imported: it would set up logging."""
    prepare_controller()


class Buffer:
    """What brings numbers to a volume and back."""

    def __init__(self, numbers: torch.Tensor | None = None) -> None:
        self.numbers = numbers

    async def read_into(self, tensor: None) -> torch.Tensor:
        assert self.numbers is not None
        return self.numbers

    async def write_from(self, tensor: torch.Tensor) -> None:
        self.numbers = tensor


def _volume(*locations: str) -> Any:
    """A volume with two pieces at each location: [0, 1] and [[2, 3], [4, 5]]."""
    from torchstore.storage_volume import InMemoryStore

    volume = SimpleNamespace(store=InMemoryStore())
    for location in locations:
        write = write_pieces(volume, location, Buffer(torch.arange(6.0)), {4: (2,), 1: (2, 2)})
        asyncio.run(write)
    return volume


def _index() -> Any:
    from torchstore.controller import Controller

    index = Controller()
    index.is_initialized = True
    return index


def _slice(coordinate: int, number: int) -> Any:
    from torchstore.transport import TensorSlice

    return TensorSlice((2 * coordinate,), (coordinate,), (2 * number,), (2,), (number,))


def test_pieces_arrive_and_leave_side_by_side() -> None:
    volume = _volume("a")
    found = asyncio.run(read_pieces(volume, "a", [1, 4], Buffer()))
    assert found.numbers.tolist() == [2.0, 3.0, 4.0, 5.0, 0.0, 1.0]
    with pytest.raises(KeyError):
        asyncio.run(read_pieces(volume, "b", [1], Buffer()))


def test_a_piece_takes_no_others_along_when_it_is_sent_alone() -> None:
    """torch sends a tensor's whole storage."""
    found = asyncio.run(read_pieces(_volume("a"), "a", [4], Buffer()))
    assert found.numbers.untyped_storage().nbytes() == 2 * 4


def test_dropping_a_version_leaves_those_whose_names_begin_alike() -> None:
    volume = _volume("weights.e0v1.r0.aa", "weights.e0v1.r1.aa", "weights.e0v12.r0.aa")
    keys = ["weights/e0v1/a.b", "weights/e0v1/MAPPING", "weights/e0v12/a.b", "leases.e0v1.x.0"]
    volume.store.kv.update(dict.fromkeys(keys, torch.zeros(2)))
    index = _index()
    index.keys_to_storage_volumes.update({key: {} for key in keys})
    asyncio.run(drop_pieces(volume, "weights.e0v1", "weights/e0v1/"))
    asyncio.run(forget(index, "weights/e0v1/"))
    assert asyncio.run(piece_locations(volume)) == ["weights.e0v12.r0.aa"]
    assert set(volume.store.kv) == set(keys[2:])
    assert set(index.keys_to_storage_volumes) == set(keys[2:])
    asyncio.run(drop_pieces(volume, "weights.e0v12.r0.aa", None))
    assert asyncio.run(piece_locations(volume)) == []
    assert set(volume.store.kv) == set(keys[2:])


def test_a_second_try_names_its_own_pieces_only() -> None:
    """A commit that failed half way may have left shards of other ranks under the key."""
    volume, index = _volume("first", "second"), _index()
    for location, slices in {
        "first": [_slice(0, 2), _slice(1, 2)],
        "second": [_slice(0, 1)],
    }.items():
        asyncio.run(name_pieces(volume, [("key", location, 4, one) for one in slices]))
        asyncio.run(announce(index, [("key", "here", one) for one in slices]))
    (shard,) = volume.store.kv["key"].values()
    assert shard["slice"] == _slice(0, 1)
    assert shard["tensor"].tolist() == [0.0, 1.0]
    assert index.keys_to_storage_volumes["key"]["here"].tensor_slices == {_slice(0, 1)}
