"""TorchTitan's AdamW and its learning-rate schedule, from our config."""

from __future__ import annotations

import torch
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)
from torchtitan.models.common.decoder import Decoder

from forge_trainer.config import LRScheduleConfig, OptimizerConfig

CONSTANT_SCHEDULE_STEPS = 2**31
"""Length given to TorchTitan for a schedule without an end; it asserts past its last step."""


def build_optimizers(
    model: Decoder, config: OptimizerConfig, device: torch.device
) -> OptimizersContainer:
    """AdamW over all parameters of this rank's part of the model."""
    adamw = default_adamw(
        lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
    )
    adamw.implementation = "fused" if device.type == "cuda" else "foreach"
    return adamw.build(model_parts=[model])


def build_schedulers(
    optimizers: OptimizersContainer, config: LRScheduleConfig
) -> LRSchedulersContainer:
    """Warm-up, stable, decay."""
    total_steps = config.total_steps or CONSTANT_SCHEDULE_STEPS
    return LRSchedulersContainer.Config(
        warmup_steps=config.warmup_steps,
        decay_ratio=config.decay_steps / total_steps,
        decay_type=config.decay_type,
        min_lr_factor=config.min_lr_factor,
    ).build(optimizers=optimizers, training_steps=total_steps)
