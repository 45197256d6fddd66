"""Many pieces in one call, which torchstore 0.1.2 lacks: endpoints for its two kinds of actors.

A volume keeps what ranks write by location and index, unknown to torchstore's clients. Once all
ranks have written, the pieces of a tensor are named: they become the shards under its key, without
a copy. So a key appears once it is whole, and late writes of an attempt that failed touch no key.
Later versions of torchstore have `put_batch`, `get_batch` and `delete_batch`; once one is pinned,
what they do may go from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from monarch.actor import endpoint
from torch import Tensor

Held = dict[str, dict[int, Tensor]]
"""Location -> index in its layout -> piece."""


def add_endpoints(volume: type, controller: type) -> None:
    """Give torchstore's StorageVolume and Controller what is below."""
    for actor, methods in ((volume, VOLUME), (controller, CONTROLLER)):
        for method in methods:
            setattr(actor, method.__name__, endpoint(method))


def _held(volume: Any) -> Held:
    return cast(Held, volume.__dict__.setdefault("forge_trainer_pieces", {}))


async def write_pieces(
    volume: Any, location: str, buffer: Any, shapes: Mapping[int, Sequence[int]]
) -> None:
    """Keep pieces of one dtype that arrive side by side; `shapes` are theirs by index."""
    packed = await buffer.read_into(None)
    held = _held(volume).setdefault(location, {})
    parts = torch.split(packed, [math.prod(shape) for shape in shapes.values()])
    for (index, shape), part in zip(shapes.items(), parts, strict=True):
        # Of its own storage: whatever is sent later takes the whole storage along.
        own = part if len(shapes) == 1 else part.clone()
        held[index] = own.view(tuple(shape))


async def read_pieces(volume: Any, location: str, indices: Sequence[int], buffer: Any) -> Any:
    """Send pieces of one dtype side by side.

    Raises:
        KeyError: they are gone.
    """
    held = _held(volume)[location]
    pieces = [held[index].reshape(-1) for index in indices]
    await buffer.write_from(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
    return buffer


async def name_pieces(volume: Any, named: Sequence[tuple[str, str, int, Any]]) -> None:
    """Make pieces the shards of keys; each is (key, location, index, slice)."""
    held = _held(volume)
    # Anew: a try that failed may have named others.
    shards: dict[str, dict[Any, dict[str, Any]]] = {}
    for key, location, index, tensor_slice in named:
        shard = {"slice": tensor_slice, "tensor": held[location][index]}
        shards.setdefault(key, {})[tensor_slice.coordinates] = shard
    volume.store.kv.update(shards)


async def drop_pieces(volume: Any, locations: str, keys: str | None) -> None:
    """Drop the pieces of a location, or of all below it, and the keys that begin so."""
    held = _held(volume)
    for location in list(held):
        if f"{location}.".startswith(f"{locations}."):
            del held[location]
    for key in list(volume.store.kv):
        if keys is not None and key.startswith(keys):
            del volume.store.kv[key]


async def piece_locations(volume: Any) -> list[str]:
    """Where pieces are held."""
    return list(_held(volume))


async def announce(controller: Any, named: Sequence[tuple[str, str, Any]]) -> None:
    """Let all clients find the shards of keys; each is (key, volume, slice)."""
    from torchstore.controller import ObjectType, StorageInfo

    controller.assert_initialized()
    shards: dict[str, dict[str, Any]] = {}
    for key, volume, tensor_slice in named:
        volumes = shards.setdefault(key, {})
        info = volumes.setdefault(volume, StorageInfo(ObjectType.TENSOR_SLICE))
        info.tensor_slices.add(tensor_slice)
    controller.keys_to_storage_volumes.update(shards)


async def forget(controller: Any, keys: str) -> None:
    """Let nobody find the keys that begin so."""
    controller.assert_initialized()
    known = controller.keys_to_storage_volumes
    for key in [key for key in known if key.startswith(keys)]:
        del known[key]


VOLUME: tuple[Callable[..., Any], ...] = (
    write_pieces,
    read_pieces,
    name_pieces,
    drop_pieces,
    piece_locations,
)
CONTROLLER: tuple[Callable[..., Any], ...] = (announce, forget)
