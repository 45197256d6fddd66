"""TorchTitan's optimizers and its learning-rate schedule, from our config."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.models.common.decoder import Decoder

from forge_trainer.config import LRScheduleConfig, OptimizerConfig
from forge_trainer.errors import ConfigError

CONSTANT_SCHEDULE_STEPS = 2**31
"""Length given to TorchTitan for a schedule without an end; it asserts past its last step."""


def build_optimizers(
    model: Decoder, config: OptimizerConfig, device: torch.device, *, all_names: Iterable[str]
) -> OptimizersContainer:
    """The optimizer of this rank's part of the model.

    `all_names` are those of the whole model: a group may match nothing in this part.

    Raises:
        ConfigError: a group matches nothing in the whole model.
    """
    names, own = list(all_names), [name for name, _ in model.named_parameters()]
    defaults = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    groups, left, left_of_all = [], own, names
    for index, group in enumerate(config.param_groups):
        if not any(re.search(group.pattern, name) for name in left_of_all):
            raise ConfigError(
                f"trainer.optimizer.param_groups.{index}.pattern: {group.pattern!r} matches none "
                "of the model's parameters that groups before it have left, such as "
                f"{sorted(left_of_all)[:3]}"
            )
        left_of_all = [name for name in left_of_all if not re.search(group.pattern, name)]
        given = group.model_dump(exclude={"pattern"}, exclude_none=True)
        if any(re.search(group.pattern, name) for name in left):
            groups.append(_group(config, group.pattern, {**defaults, **given}))
        left = [name for name in left if not re.search(group.pattern, name)]
    if left:
        groups.append(_group(config, ".*", defaults))
    implementation = config.implementation
    if implementation == "auto":
        implementation = "fused" if device.type == "cuda" else "foreach"
    wanted = OptimizersContainer.Config(param_groups=groups, implementation=implementation)
    return wanted.build(model_parts=[model])


def _group(config: OptimizerConfig, pattern: str, settings: dict[str, Any]) -> ParamGroupConfig:
    return ParamGroupConfig(pattern=pattern, optimizer_name=config.name, optimizer_kwargs=settings)


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
