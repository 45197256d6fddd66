"""Which volume a process writes to: that of its own host.

This class travels to every client of the store, also to those without this package: whatever it
uses must be here, in torchstore or in Python.
"""

from __future__ import annotations

import os
from typing import Any

from torchstore.strategy import TorchStoreStrategy


class VolumePerHost(TorchStoreStrategy):  # type: ignore[misc]
    """One volume per trainer host, called like the host that it serves."""

    @classmethod
    def get_volume_id(cls) -> str:
        """Of the host that this process is on, whether it is a volume or writes to one.

        Always there: a volume that fails on its way up spoils torchstore for the whole process.
        """
        return os.environ.get("FORGE_TRAINER_HOST", "local")

    get_client_id = get_volume_id

    async def set_storage_volumes(self, storage_volumes: Any) -> None:
        """Learn the volumes' names.

        Raises:
            ValueError: two of them are on one host.
        """
        await super().set_storage_volumes(storage_volumes)
        if len(self.volume_id_to_coord) != len(storage_volumes):
            raise ValueError(
                f"{len(storage_volumes)} volumes of torchstore are on "
                f"{sorted(self.volume_id_to_coord)} by FORGE_TRAINER_HOST; start one per host"
            )

    def select_storage_volume(self) -> tuple[Any, str]:
        """(volume, its name): the host's own, or the first where the host has none."""
        own = self.get_client_id()
        chosen = own if own in self.volume_id_to_coord else min(self.volume_id_to_coord)
        return self.get_storage_volume(chosen), chosen
