"""The values that cross a border: what goes into a trainer, what comes out, what is published.

Axes in names: B rows, T positions, V vocabulary, G members of a group.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from forge_trainer.errors import CheckpointError, DataError
from forge_trainer.metrics import Metric

CheckpointFormat = Literal["dcp", "hf"]
Normalize = Literal["tokens", "sequences", "none"]

PER_TOKEN_FIELDS = ("advantages", "generator_logprobs", "ref_logprobs", "token_weights")
"""The optional per-token fields of a TrainSequence; each sits at the token it describes."""


def _require(name: str, value: float | None, holds: Callable[[float], bool], wanted: str) -> None:
    if value is not None and not (math.isfinite(value) and holds(value)):
        raise DataError(f"{name} is {value}; it must be finite and {wanted}")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question for the model, as text, with what the reward needs to judge the answer."""

    text: str
    answer: str
    task: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are sampled. Top-p and top-k are absent: they make the ratio a lie."""

    max_completion_tokens: int
    temperature: float = 1.0
    num_completions: int = 1
    """Completions per prompt (the group size G)."""

    def __post_init__(self) -> None:
        """Raises DataError for values that nothing can be sampled with."""
        for name in ("max_completion_tokens", "temperature", "num_completions"):
            _require(name, getattr(self, name), lambda x: x > 0, "above 0")


@dataclass(frozen=True, slots=True)
class Completion:
    """What a generator answers, with the log-probs of the distribution it was sampled from."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per completion token, in nats, at `temperature`."""
    text: str
    policy_version: int
    temperature: float
    stopped: bool
    """True: ended by a stop token. False: cut at the length limit."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A completion with its reward; episodes of one prompt share `group_id`."""

    prompt: Prompt
    completion: Completion
    reward: float
    group_id: int


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One ragged training item of L tokens.

    Every per-token field has length L and sits at the index of the token it describes:
    `loss_mask[t]` says that token t is a target. The first token can never be one.
    """

    token_ids: Sequence[int]
    loss_mask: Sequence[int]
    advantages: Sequence[float] | None = None
    generator_logprobs: Sequence[float] | None = None
    ref_logprobs: Sequence[float] | None = None
    token_weights: Sequence[float] | None = None
    """Multiplies a token's loss, e.g. 1/|o_i| for a per-sequence mean. None means 1."""
    temperature: float = 1.0
    """The temperature the completion was sampled at; log-probs are computed at the same one."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One packed microbatch for one data-parallel rank. All tensors are [B, T].

    Padding has document id -1, position 0 and an all-zero mask. Document ids are the index of
    the sequence in the call that packed it.
    """

    token_ids_BT: Tensor
    positions_BT: Tensor
    document_ids_BT: Tensor
    loss_mask_BT: Tensor
    temperatures_BT: Tensor
    advantages_BT: Tensor | None = None
    generator_logprobs_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    token_weights_BT: Tensor | None = None
    entropies_BT: Tensor | None = None
    """Of the policy, with gradient, in nats; only for losses that ask for it."""

    def to(self, device: torch.device) -> TrainBatch:
        """The same batch on `device`."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        moved: dict[str, Any] = {
            name: None if value is None else value.to(device) for name, value in values.items()
        }
        return dataclasses.replace(self, **moved)

    def select_rows(self, rows: Tensor) -> TrainBatch:
        """A batch of the given rows."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        chosen: dict[str, Any] = {
            name: None if value is None else value[rows] for name, value in values.items()
        }
        return dataclasses.replace(self, **chosen)

    def require(self, field_name: str, loss_name: str) -> Tensor:
        """The optional field `field_name`, or a ValueError that says which loss needs it."""
        value: Tensor | None = getattr(self, f"{field_name}_BT")
        if value is None:
            raise ValueError(f"loss {loss_name!r} needs the per-token field {field_name!r}")
        return value


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What a loss returns: `total` is a 0-dim SUM over target tokens, never a mean."""

    total: Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)
    """May hold 0-dim tensors: they stay on the device until the call ends."""


LossFn = Callable[[Tensor, TrainBatch], LossOutput]
"""(logprobs_BT, batch) -> LossOutput"""

RewardFn = Callable[[str, Prompt], float]
"""(completion text, its prompt) -> reward"""


@dataclass(frozen=True, slots=True)
class OptimParams:
    """Optimizer settings for one step; None keeps the configured value."""

    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        """Raises DataError for values that no optimizer can mean."""
        _require("lr", self.lr, lambda x: x >= 0, "at least 0")
        _require("eps", self.eps, lambda x: x > 0, "above 0")
        _require("weight_decay", self.weight_decay, lambda x: x >= 0, "at least 0")
        _require("max_grad_norm", self.max_grad_norm, lambda x: x > 0, "above 0")
        for beta in self.betas or ():
            _require("betas", beta, lambda x: 0 <= x < 1, "in [0, 1)")


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


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Per-sequence log-probs, aligned with the tokens; index 0 is 0.0 and means nothing."""

    logprobs: list[list[float]]
    entropies: list[list[float]] | None = None
    """Entropy in nats of the distribution each token was drawn from, if asked for."""


@dataclass(frozen=True, slots=True)
class ForwardBackwardResult:
    metrics: dict[str, Metric]
    """`loss/...` metrics; `loss/mean` is the loss sum divided by the number of target tokens."""
    num_target_tokens: int
    num_sequences: int
    """Sequences with at least one target token."""
    logprobs: list[list[float]] | None = None
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


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a checkpoint is to hold."""

    path: str
    weights_only: bool = False
    """Without optimizer, schedule and random state."""
    format: CheckpointFormat = "dcp"
    """`hf` is a Hugging Face directory, which holds weights only."""
    wait: bool = True
    """False: return once the state is copied, and write the files beside the next calls."""

    def __post_init__(self) -> None:
        """Raises CheckpointError for what cannot be asked for."""
        if self.format not in get_args(CheckpointFormat):
            raise CheckpointError(
                f"format is {self.format!r}; use one of {get_args(CheckpointFormat)}"
            )
        if self.format == "hf" and not self.wait:
            raise CheckpointError("format 'hf' is written at once; wait=False is for 'dcp'")

    @property
    def is_full(self) -> bool:
        """With all that a resumed run needs."""
        return self.format == "dcp" and not self.weights_only


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What was really written or loaded."""

    path: str
    step: int
    format: CheckpointFormat
    complete: bool
    weights_only: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """Where a process stands in its group."""

    rank: int = 0
    local_rank: int = 0
    """Index among the processes of its host; picks the GPU."""
    size: int = 1


@dataclass(frozen=True, slots=True)
class CallTicket:
    """Which handle makes a call to a trainer mesh, and the how-manieth of its calls it is."""

    handle_id: str
    number: int
