"""What a trainer is given: sequences, batches they are packed into, losses, a step's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from forge_trainer.metrics import Metric

from .arrays import EqualByValue, PerToken
from .numbers import require_number

Normalize = Literal["tokens", "sequences", "none"]


PER_TOKEN_FIELDS = (
    "advantages",
    "generator_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "token_weights",
)
"""The optional per-token fields of a TrainSequence; each sits at the token it describes."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainSequence(EqualByValue):
    """One ragged training item of L tokens, in lists or, better, NumPy arrays.

    Every per-token field has length L and sits at the index of the token it describes:
    `loss_mask[t]` says that token t is a target. The first token can never be one.
    """

    token_ids: PerToken
    loss_mask: PerToken
    advantages: PerToken | None = None
    generator_logprobs: PerToken | None = None
    """Of the policy that the tokens were sampled from, as the generator computed them."""
    old_logprobs: PerToken | None = None
    """Of the trainer itself, before it made its first update from these sequences; what a loss
    with a `correction` measures updates from. None: the loss takes the current ones."""
    ref_logprobs: PerToken | None = None
    token_weights: PerToken | None = None
    """Multiplies a token's loss, e.g. 1/|o_i| for a per-sequence mean. None means 1."""
    temperature: float = 1.0
    """The temperature the completion was sampled at; log-probs are computed at the same one."""
    extra: Mapping[str, PerToken] = field(default_factory=dict)
    """Further columns for a loss of your own, which finds them in `TrainBatch.extra`."""

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
    old_logprobs_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    token_weights_BT: Tensor | None = None
    entropies_BT: Tensor | None = None
    """Of the policy, with gradient, in nats; only for losses that ask for it."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """The sequences' own columns by name, [B, T], zero in padding: float32, or int64 for integers
    and booleans."""

    def to(self, device: torch.device) -> TrainBatch:
        """The same batch on `device`."""
        return self._with_each(lambda tensor: tensor.to(device))

    def select_rows(self, rows: Tensor) -> TrainBatch:
        """A batch of the given rows."""
        return self._with_each(lambda tensor: tensor[rows])

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> TrainBatch:
        changed: dict[str, Any] = {
            f.name: change(value)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        extra = {name: change(tensor) for name, tensor in self.extra.items()}
        return dataclasses.replace(self, **changed, extra=extra)

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
        require_number("lr", self.lr, lambda x: x >= 0, "at least 0")
        require_number("eps", self.eps, lambda x: x > 0, "above 0")
        require_number("weight_decay", self.weight_decay, lambda x: x >= 0, "at least 0")
        require_number("max_grad_norm", self.max_grad_norm, lambda x: x > 0, "above 0")
        for beta in self.betas or ():
            require_number("betas", beta, lambda x: 0 <= x < 1, "in [0, 1)")
