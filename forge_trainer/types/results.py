"""What a trainer answers, as one rank and as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from forge_trainer.metrics import Metric


@dataclass(frozen=True, slots=True)
class MicrobatchOutput:
    """Log-probs (float32, on the CPU) of one microbatch, aligned with its tokens."""

    logprobs_BT: Tensor
    entropies_BT: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EngineForwardBackward:
    """This rank's share of a forward_backward call."""

    loss_sum: float
    num_target_tokens: int
    num_sequences: int
    metrics: dict[str, Metric]
    logprobs_BT: list[Tensor]
    """One per microbatch, float32, on the CPU; empty unless asked for."""
    peak_memory_bytes: int = 0
    """Of the device since the last call; on the CPU, of the process since it started."""


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Per-sequence log-probs, float32, aligned with the tokens; index 0 is 0.0 and means nothing.

    In nats, under the current weights and at each sequence's temperature.
    """

    logprobs: list[NDArray[np.float32]]
    entropies: list[NDArray[np.float32]] | None = None
    """Entropy in nats of the distribution each token was drawn from, if asked for."""


@dataclass(frozen=True, slots=True)
class ForwardBackwardResult:
    metrics: dict[str, Metric]
    """`loss/...` metrics; `loss/mean` is the loss sum divided by the number of target tokens."""
    num_target_tokens: int
    num_sequences: int
    """Sequences with at least one target token."""
    logprobs: list[NDArray[np.float32]] | None = None
    """Per sequence, aligned with its tokens, if asked for."""


@dataclass(frozen=True, slots=True)
class OptimStepResult:
    step: int
    """Optimizer updates completed, this one included."""
    grad_norm: float
    """L2 norm of the normalised gradient before clipping."""
    learning_rate: float
    """The rate this update used."""
    skipped: bool = False
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainStepResult:
    forward_backward: ForwardBackwardResult
    optim: OptimStepResult
