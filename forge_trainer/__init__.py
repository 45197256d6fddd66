"""forge_trainer: the trainer half of reinforcement-learning post-training.

Public names load on first use, so that importing the package loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_trainer.controller.in_process import start_in_process_trainer
    from forge_trainer.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        EngineError,
        ForgeTrainerError,
        NonFiniteError,
        RolloutError,
        WeightsError,
        WorkerLostError,
    )
    from forge_trainer.pieces import WeightsRef
    from forge_trainer.processes.lifecycle import running_services
    from forge_trainer.types import (
        ForwardBackwardResult,
        LossOutput,
        OptimParams,
        OptimStepResult,
        SamplingParams,
        TrainBatch,
        TrainSequence,
    )

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineError",
    "ForgeTrainerError",
    "ForwardBackwardResult",
    "LossOutput",
    "NonFiniteError",
    "OptimParams",
    "OptimStepResult",
    "RolloutError",
    "SamplingParams",
    "TrainBatch",
    "TrainSequence",
    "WeightsError",
    "WeightsRef",
    "WorkerLostError",
    "running_services",
    "start_in_process_trainer",
]

_ELSEWHERE = {
    "WeightsRef": "forge_trainer.pieces",
    "running_services": "forge_trainer.processes.lifecycle",
    "start_in_process_trainer": "forge_trainer.controller.in_process",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'forge_trainer' has no attribute {name!r}")
    module = "errors" if name.endswith("Error") else "types"
    return getattr(importlib.import_module(_ELSEWHERE.get(name, f"forge_trainer.{module}")), name)
