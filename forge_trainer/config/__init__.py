"""What can be configured. Unknown keys are errors; ranges sit on fields, relations in validators.

Nothing here imports torch. `load` reads files and command lines.
"""

from .algorithm import AlgorithmConfig, TaskConfig
from .generation import GeneratorConfig
from .layout import ParallelConfig
from .model import ModelConfig, TinyModelConfig
from .optimizer import LRScheduleConfig, OptimizerConfig, ParamGroupConfig
from .schema import GrpoConfig, ReferenceConfig, ReportingConfig, RunConfig
from .section import Section
from .trainer import PackingConfig, ProfilingConfig, TrainerConfig
from .weights import WeightsConfig

__all__ = [
    "AlgorithmConfig",
    "GeneratorConfig",
    "GrpoConfig",
    "LRScheduleConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PackingConfig",
    "ParallelConfig",
    "ParamGroupConfig",
    "ProfilingConfig",
    "ReferenceConfig",
    "ReportingConfig",
    "RunConfig",
    "Section",
    "TaskConfig",
    "TinyModelConfig",
    "TrainerConfig",
    "WeightsConfig",
]
