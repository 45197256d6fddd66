"""Lets torchstore 0.1.2 run on torchmonarch 0.7.0. Applied in every process that uses the store.

Monarch 0.2 and later refuse an actor that mixes async and sync endpoints, and torchstore 0.1.2's
Controller does. The sync ones are wrapped. Upstream mended this in pytorch/torchstore#74; the file
may go when a release with it is pinned. On such a torchstore nothing is wrapped.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from monarch._src.actor.endpoint import EndpointProperty
from monarch.actor import endpoint

from .torchstore_batches import add_endpoints


def apply() -> int:
    """Wrap the sync endpoints of torchstore's Controller, and add our own to its actors.

    Returns:
        The number that were wrapped.
    """
    controller, volume = _import_quietly()
    sync = {
        name: value._method
        for name in dir(controller)
        if isinstance(value := inspect.getattr_static(controller, name), EndpointProperty)
        and not inspect.iscoroutinefunction(value._method)
    }
    for name, method in sync.items():
        setattr(controller, name, endpoint(_as_async(method)))
    add_endpoints(volume, controller)
    return len(sync)


def _as_async(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    return wrapped


def _import_quietly() -> tuple[type, type]:
    """torchstore's actors, without what importing torchstore does to the root logger."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    from torchstore.controller import Controller
    from torchstore.storage_volume import StorageVolume

    root.handlers[:] = handlers
    root.setLevel(level)
    return Controller, StorageVolume
