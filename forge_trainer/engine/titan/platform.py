"""The device and the process group of one rank."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims
import torchtitan.distributed.utils
import torchtitan.tools.utils

from forge_trainer.errors import ConfigError
from forge_trainer.types import World


def select_device(device: torch.device, world: World) -> torch.device:
    """Tell TorchTitan and torch which device this rank uses."""
    if device.type == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {world.rank} is process {world.local_rank} of its host, where torch finds "
                f"{torch.cuda.device_count()} GPUs; every rank needs one"
            )
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
    # TorchTitan 0.3.0 picks its device when imported, and falls back to "cuda" where there is no
    # accelerator. The modules below hold that choice; it may go when TorchTitan takes a device.
    for module in (torchtitan.tools.utils, torchtitan.distributed.utils):
        module.device_type = device.type
        module.device_module = torch.get_device_module(device.type)
    torchtitan.distributed.parallel_dims.device_type = device.type
    return device


_members = 0
"""Engines of this process in the default group, if `join_process_group` made it."""


def join_process_group(device: torch.device, world: World, timeout_s: float) -> bool:
    """Become a member of the default group; True if `leave_process_group` is to be called.

    A group that somebody else has made is used and left alone. With more than one rank,
    MASTER_ADDR and MASTER_PORT must be set.
    """
    global _members
    if dist.is_initialized():
        _members += int(_members > 0)
        return _members > 0
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    timeout = timedelta(seconds=timeout_s)
    if world.size == 1:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    else:
        dist.init_process_group(
            backend, init_method="env://", rank=world.rank, world_size=world.size, timeout=timeout
        )
    _members = 1
    return True


def leave_process_group() -> None:
    """The last engine to leave ends the group."""
    global _members
    _members -= 1
    if _members == 0 and dist.is_initialized():
        dist.destroy_process_group()
