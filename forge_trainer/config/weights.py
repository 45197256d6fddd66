"""How weights are published."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from .section import Folder, Section


class WeightsConfig(Section):
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters are published in; the generator runs in the same."""
    transport: Literal["auto", "shared_memory", "torchstore"] = "auto"
    """How weights travel; auto takes shared memory where trainer and generator share it."""
    shared_memory_folder: Folder | None = None
    """Where shared memory is mounted; None takes /dev/shm."""
    stage: Literal["copy", "in_place"] = "copy"
    """Copy weights before a push returns; or read the live ones beside the next passes, so that the
    next update waits for it."""
    keep_versions: PositiveInt = 2
    """Published versions that stay; older ones are dropped once nobody reads them."""
    verify: Literal["full", "sample", "off"] = "full"
    """Checksums that are made when publishing and compared when pulling: of every tensor, of one in
    eight (others at the next version), or none. Names, shapes and dtypes are always compared."""
    lease_timeout_s: PositiveFloat = 30.0
    """A reader in torchstore that gave no sign for so long is dead; in shared memory the system
    knows at once. Versions that wait for their readers are looked at four times in this time."""

    @model_validator(mode="after")
    def folder_is_of_use(self) -> Self:
        if self.shared_memory_folder is not None and self.transport == "torchstore":
            raise ValueError(
                f"shared_memory_folder: {self.shared_memory_folder}, but transport is torchstore; "
                "leave one of them out"
            )
        return self
