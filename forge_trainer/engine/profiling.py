"""Traces and memory snapshots of chosen steps, one file of each per step and rank.

A step begins with the first forward or backward pass after an update, and ends with its update.
"""

from __future__ import annotations

import contextlib
import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from forge_trainer.config import ProfilingConfig
from forge_trainer.errors import ConfigError

logger = logging.getLogger(__name__)


class StepProfiler:
    """Records on the thread that calls it; step N is the work that leads to N updates."""

    def __init__(self, config: ProfilingConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._step: int | None = None
        self._trace: Any = None

    def begin(self, step: int) -> None:
        """Record from here, if `step` is chosen and not being recorded already.

        Neither this nor `end` raises: no trace is worth a step.
        """
        if self._step == step:
            return
        self.end()
        with _logging_errors(step):
            if step in self._config.memory_steps:
                self._step = step
                torch.cuda.memory._record_memory_history(stacks="python")
            if step in self._config.trace_steps:
                self._step = step
                activities = [torch.profiler.ProfilerActivity.CPU]
                if torch.cuda.is_available():
                    activities.append(torch.profiler.ProfilerActivity.CUDA)
                trace = torch.profiler.profile(activities=activities, record_shapes=True)
                trace.start()
                self._trace = trace

    def end(self) -> None:
        """Write what was recorded, if anything was."""
        if self._step is None:
            return
        step, trace = self._step, self._trace
        self._step = self._trace = None
        with _logging_errors(step):
            if trace is not None:
                trace.stop()
                trace.export_chrome_trace(str(self._file(step, "trace.json.gz")))
        if step in self._config.memory_steps:
            with _logging_errors(step):
                torch.cuda.memory._dump_snapshot(str(self._file(step, "memory.pickle")))
                torch.cuda.memory._record_memory_history(enabled=None)

    def _file(self, step: int, kind: str) -> Path:
        folder = Path(str(self._config.folder))
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"step-{step}-rank-{self._rank}.{kind}"


@contextlib.contextmanager
def _logging_errors(step: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning("step %d is not profiled: %s: %s", step, type(error).__name__, error)


def require_memory_snapshots(config: ProfilingConfig, device: str) -> None:
    """Raises ConfigError if snapshots are asked for on a device that has none."""
    if config.memory_steps and not device.startswith("cuda"):
        raise ConfigError(
            f"trainer.profiling.memory_steps: torch takes memory snapshots on CUDA only, and the "
            f"trainer's device is {device}; use trace_steps"
        )


def peak_memory_bytes() -> int:
    """Of the GPU since this was asked last; without one, of the process since it started."""
    if torch.cuda.is_initialized():
        peak: int = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
