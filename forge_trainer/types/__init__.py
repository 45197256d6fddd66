"""The values that cross a border: what goes into a trainer, what comes out.

Axes in names: B rows, T positions, V vocabulary, G members of a group.
"""

from .calls import CallTicket, World
from .checkpoints import CheckpointFormat, CheckpointInfo, SaveRequest
from .devices import Gpu, HostInventory
from .generation import Completion, GenerationRequest, SamplingParams
from .messages import Message, MessageRole, Opening, Reply, StopReason, ToolCall
from .results import (
    EngineForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    MicrobatchOutput,
    OptimStepResult,
    TrainStepResult,
)
from .rollouts import (
    Episode,
    EpisodeStatus,
    GroupRewardFn,
    Prompt,
    PromptKey,
    RewardFn,
    Transcript,
)
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
    "EpisodeStatus",
    "ForwardBackwardResult",
    "ForwardResult",
    "GenerationRequest",
    "Gpu",
    "GroupRewardFn",
    "HostInventory",
    "LossFn",
    "LossOutput",
    "Message",
    "MessageRole",
    "MicrobatchOutput",
    "Normalize",
    "Opening",
    "OptimParams",
    "OptimStepResult",
    "PER_TOKEN_FIELDS",
    "Prompt",
    "PromptKey",
    "Reply",
    "RewardFn",
    "SamplingParams",
    "SaveRequest",
    "StopReason",
    "ToolCall",
    "TrainBatch",
    "TrainSequence",
    "TrainStepResult",
    "Transcript",
    "World",
]
