"""What can be configured. Unknown keys are errors; ranges sit on fields, relations in validators.

Nothing here imports torch. `load` reads files and command lines.
"""

from .algorithm import AlgorithmConfig
from .launch import KubernetesConfig, LaunchConfig, SlurmConfig, TlsConfig
from .layout import ParallelConfig
from .model import ModelConfig, TinyModelConfig
from .optimizer import LRScheduleConfig, OptimizerConfig, ParamGroupConfig
from .placement import PlacementConfig, Role
from .rollout.asynchrony import AsyncConfig
from .rollout.environment import TASK_REWARD, EnvironmentConfig, FixedReward, RewardConfig
from .rollout.evaluation import EvalConfig
from .rollout.generation import GeneratorConfig
from .rollout.task import FILE_KINDS, ColumnsConfig, OnLongPrompt, TaskConfig
from .rollout.vllm import VllmConfig
from .schema import GrpoConfig, ReferenceConfig, ReportingConfig, RunConfig
from .section import Section
from .trainer import PackingConfig, ProfilingConfig, TrainerConfig
from .weights import WeightsConfig

__all__ = [
    "TASK_REWARD",
    "AlgorithmConfig",
    "AsyncConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "FixedReward",
    "ColumnsConfig",
    "FILE_KINDS",
    "GeneratorConfig",
    "GrpoConfig",
    "KubernetesConfig",
    "LRScheduleConfig",
    "LaunchConfig",
    "ModelConfig",
    "OnLongPrompt",
    "OptimizerConfig",
    "PackingConfig",
    "ParallelConfig",
    "ParamGroupConfig",
    "PlacementConfig",
    "ProfilingConfig",
    "ReferenceConfig",
    "ReportingConfig",
    "RewardConfig",
    "Role",
    "RunConfig",
    "Section",
    "SlurmConfig",
    "TaskConfig",
    "TinyModelConfig",
    "TlsConfig",
    "TrainerConfig",
    "VllmConfig",
    "WeightsConfig",
]
