"""What hosts have: this one is asked, others are described by the config until they are there.

The controller never opens a GPU: NVML tells what there is without a CUDA context.
"""

from __future__ import annotations

import os
from dataclasses import replace

import psutil
import pynvml

from forge_trainer.config import LaunchConfig
from forge_trainer.types import Gpu, HostInventory


def find_inventory(launch: LaunchConfig) -> HostInventory:
    """Of each host on which the run's processes will be."""
    if launch.kind == "processes":
        # They share what this machine has.
        hosts = sum(launch.num_hosts.values())
        return HostInventory((), max(1, _usable_cores() // hosts), _memory_bytes() // hosts)
    if launch.kind != "local":
        return HostInventory(tuple(Gpu(str(i)) for i in range(launch.gpus_per_host or 0)))
    here = this_machine()
    return replace(here, gpus=here.gpus[: launch.gpus_per_host])


def this_machine() -> HostInventory:
    """What a process that is started from here finds."""
    return HostInventory(tuple(_visible_gpus()), _usable_cores(), _memory_bytes())


def _visible_gpus() -> list[Gpu]:
    """Those that CUDA would show to a process started from here."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        gpus = [_gpu(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    return visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(gpus: list[Gpu], variable: str | None) -> list[Gpu]:
    """What CUDA_VISIBLE_DEVICES leaves of a host's GPUs, in its order and under its names.

    As in CUDA, the first name that is no GPU ends the list.
    """
    if variable is None:
        return gpus
    left = []
    for name in filter(None, (part.strip() for part in variable.split(","))):
        if name.isdecimal() and int(name) < len(gpus):
            left.append(gpus[int(name)])
        elif name.startswith(("GPU-", "MIG-")):
            left.append(Gpu(name))
        else:
            break
    return left


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    model = pynvml.nvmlDeviceGetName(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        name=str(index),
        model=model.decode() if isinstance(model, bytes) else model,
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
        capability=(major, minor),
    )


def _usable_cores() -> int:
    return len(psutil.Process().cpu_affinity() or ()) or 1


def _memory_bytes() -> int:
    return int(psutil.virtual_memory().total)
