"""What can be configured of updates: optimizer and schedule."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from .section import Fraction, Section

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class ParamGroupConfig(Section):
    """Parameters with settings of their own; None takes those of the others."""

    pattern: str
    """A regular expression that is searched for in TorchTitan's names, such as `norm` or
    `^tok_embeddings`; of several groups, the first that matches takes a parameter."""
    lr: Annotated[float, Field(ge=0.0)] | None = None
    weight_decay: Annotated[float, Field(ge=0.0)] | None = None

    @model_validator(mode="after")
    def group_changes_something(self) -> Self:
        if self.lr is None and self.weight_decay is None:
            raise ValueError("has neither lr nor weight_decay, so it changes nothing; give one")
        return self

    @field_validator("pattern")
    @classmethod
    def pattern_is_a_regular_expression(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        return pattern


class OptimizerConfig(Section):
    name: Literal["AdamW", "Adam"] = "AdamW"
    implementation: Literal["auto", "for-loop", "foreach", "fused"] = "auto"
    """How torch runs it; auto is fused on a GPU and foreach on the CPU."""
    param_groups: list[ParamGroupConfig] = []
    """Parameters that are updated otherwise, e.g. norms without weight decay."""
    lr: Annotated[float, Field(ge=0.0)] = 1e-5
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this L2 norm, over all parameters and ranks."""


class LRScheduleConfig(Section):
    """Linear warm-up, stable, decay. The default is a constant rate."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """The last steps of `total_steps`, in which the rate falls."""
    total_steps: PositiveInt | None = None
    """Needed with decay_steps."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    min_lr_factor: Fraction = 0.0

    @model_validator(mode="after")
    def phases_fit_into_total_steps(self) -> Self:
        if self.decay_steps and self.total_steps is None:
            raise ValueError("decay_steps needs total_steps")
        if not self.decay_steps and (self.decay_type != "linear" or self.min_lr_factor):
            raise ValueError(
                "decay_type and min_lr_factor need decay_steps and total_steps; without them the "
                "rate never falls"
            )
        if self.total_steps is not None:
            phases = self.warmup_steps + self.decay_steps
            if phases > self.total_steps:
                raise ValueError(
                    f"warmup_steps + decay_steps = {phases} exceed total_steps={self.total_steps}"
                )
        return self
