"""Which devices the processes of a run get, on the hosts that `launch` gives them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from .section import Section

Role = Literal["trainer", "reference", "generator"]
"""The meshes of a run."""


class PlacementConfig(Section):
    """By default trainer, reference and generator get GPUs in this order, each its own, one for
    every process. A GPU is an index into those that a host has, or that CUDA_VISIBLE_DEVICES
    leaves. Does nothing for what runs on the CPU."""

    devices: dict[Role, list[Annotated[int, Field(ge=0)]]] = {}
    """GPUs of a mesh on each of its hosts, one per process there; what is left out gets the next
    free ones."""
    colocate: list[Role] = []
    """Meshes that share GPUs, such as [reference, trainer]."""

    @model_validator(mode="after")
    def lists_name_things_once(self) -> Self:
        for role, devices in self.devices.items():
            if not devices or len(set(devices)) < len(devices):
                raise ValueError(f"devices.{role}: {devices} must name some GPUs, each once")
        if len(self.colocate) == 1 or len(set(self.colocate)) < len(self.colocate):
            raise ValueError(f"colocate: {self.colocate} must name two meshes or more, each once")
        return self
