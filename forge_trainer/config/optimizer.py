"""What can be configured of updates: optimizer and schedule."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from .section import Fraction, Section


class OptimizerConfig(Section):
    """AdamW."""

    lr: Annotated[float, Field(ge=0.0)] = 1e-5
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
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
        if self.total_steps is not None:
            phases = self.warmup_steps + self.decay_steps
            if phases > self.total_steps:
                raise ValueError(
                    f"warmup_steps + decay_steps = {phases} exceed total_steps={self.total_steps}"
                )
        return self
