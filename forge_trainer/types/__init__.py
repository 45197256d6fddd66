"""The values that cross a border: what goes into a trainer, what comes out.

Axes in names: B rows, T positions, V vocabulary, G members of a group.
"""

from .calls import CallTicket, World
from .checkpoints import CheckpointFormat, CheckpointInfo, SaveRequest
from .devices import Gpu, HostInventory
from .results import (
    EngineForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    MicrobatchOutput,
    OptimStepResult,
    TrainStepResult,
)
from .rollouts import Completion, Episode, Prompt, RewardFn, SamplingParams
from .training import (
    PER_TOKEN_FIELDS,
    LossFn,
    LossOutput,
    Normalize,
    OptimParams,
    TrainBatch,
    TrainSequence,
)

__all__ = [
    "CallTicket",
    "CheckpointFormat",
    "CheckpointInfo",
    "Completion",
    "EngineForwardBackward",
    "Episode",
    "ForwardBackwardResult",
    "ForwardResult",
    "Gpu",
    "HostInventory",
    "LossFn",
    "LossOutput",
    "MicrobatchOutput",
    "Normalize",
    "OptimParams",
    "OptimStepResult",
    "PER_TOKEN_FIELDS",
    "Prompt",
    "RewardFn",
    "SamplingParams",
    "SaveRequest",
    "TrainBatch",
    "TrainSequence",
    "TrainStepResult",
    "World",
]
