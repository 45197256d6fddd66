"""Whether a run's config fits the hosts and the model. Raises ConfigError, and starts nothing."""

from __future__ import annotations

from pathlib import Path

from forge_trainer.config import GrpoConfig
from forge_trainer.controller.checks import check_models
from forge_trainer.hf import model_directory
from forge_trainer.processes.hosts.placement import Placement, plan_placement
from forge_trainer.types import HostInventory


def placed(config: GrpoConfig, inventory: HostInventory) -> Placement:
    """Who gets what."""
    return plan_placement(
        config.trainers, config.generator, config.placement, config.launch, inventory
    )


def checked_model(config: GrpoConfig, scratch: Path, inventory: HostInventory) -> Path:
    """The model's directory, which a tiny one is made in; the config fits it."""
    model_dir = model_directory(config.model, scratch, seed=config.run.seed)
    check_models(
        model_dir,
        config.trainers.values(),
        config.generator,
        config.weights,
        gpus=inventory.gpus,
    )
    return model_dir
