"""Traces and memory snapshots of chosen steps, one file of each per step and rank.

A step begins with the first forward or backward pass after an update, and ends with its update.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forge_trainer.config.trainer import ProfilingConfig
from forge_trainer.errors import ConfigError


class StepProfiler:
    """Records on the thread that calls it; step N is the work that leads to N updates."""

    def __init__(self, config: ProfilingConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._step: int | None = None
        self._trace: Any = None

    def begin(self, step: int, device: str) -> None:
        """Record from here, if `step` is chosen and not being recorded already.

        Raises:
            ConfigError: a memory snapshot is asked for where there is no GPU.
        """
        if self._step == step:
            return
        self.end()
        if step in self._config.memory_steps:
            require_memory_snapshots(self._config, device)
            torch.cuda.memory._record_memory_history(stacks="python")
            self._step = step
        if step in self._config.trace_steps:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._trace = torch.profiler.profile(activities=activities, record_shapes=True)
            self._trace.start()
            self._step = step

    def end(self) -> None:
        """Write what was recorded, if anything was."""
        if self._step is None:
            return
        step, self._step = self._step, None
        if self._trace is not None:
            self._trace.stop()
            self._trace.export_chrome_trace(str(self._file(step, "trace.json.gz")))
            self._trace = None
        if step in self._config.memory_steps:
            torch.cuda.memory._dump_snapshot(str(self._file(step, "memory.pickle")))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _file(self, step: int, kind: str) -> Path:
        folder = Path(str(self._config.folder))
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"step-{step}-rank-{self._rank}.{kind}"


def require_memory_snapshots(config: ProfilingConfig, device: str) -> None:
    """Raises ConfigError if snapshots are asked for on a device that has none."""
    if config.memory_steps and not device.startswith("cuda"):
        raise ConfigError(
            f"trainer.profiling.memory_steps: torch takes memory snapshots on CUDA only, and the "
            f"trainer's device is {device}; use trace_steps"
        )
