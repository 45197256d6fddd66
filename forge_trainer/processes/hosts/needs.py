"""What a run needs of its hosts, and what of it they do not have."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from forge_trainer.config import GeneratorConfig, Role, TrainerConfig, WeightsConfig
from forge_trainer.errors import ConfigError
from forge_trainer.functional.estimates.memory import (
    ModelSize,
    generator_memory,
    published_memory,
    staging_memory,
    trainer_memory,
)
from forge_trainer.hf import count_parameters, read_model_facts
from forge_trainer.types import HostInventory
from forge_trainer.weights.shared_memory.folder import default_root

from .placement import MeshPlan, Placement

logger = logging.getLogger(__name__)

GB = 1e9


@dataclass(frozen=True, slots=True)
class Needs:
    """In bytes."""

    per_process: Mapping[Role, Mapping[str, int]]
    """On its device, by what it is for."""
    staging: int
    """Of the host, for each trainer rank that publishes."""
    published: int
    """Of the trainer's hosts together: versions in shared memory, or in torchstore's volumes."""


def model_size(path: Path) -> ModelSize:
    """Of a Hugging Face directory."""
    facts = read_model_facts(path)
    return ModelSize(
        num_parameters=count_parameters(path),
        vocab_size=facts.vocab_size,
        num_layers=facts.num_layers,
        head_dim=facts.attention_width // facts.num_heads,
        max_sequence_tokens=facts.max_sequence_tokens,
    )


def needs_of(
    model: ModelSize,
    trainers: Mapping[Role, TrainerConfig],
    generator: GeneratorConfig,
    weights: WeightsConfig,
    *,
    rows: int,
) -> Needs:
    """What processes and hosts must hold, activations and caches aside.

    `rows` are the completions that the generator is asked for at once.
    """
    per_process: dict[Role, Mapping[str, int]] = {
        role: trainer_memory(model, config) for role, config in trainers.items()
    }
    per_process["generator"] = generator_memory(model, generator, weights, rows=rows)
    return Needs(
        per_process,
        staging=staging_memory(model, trainers["trainer"], weights),
        published=published_memory(model, weights),
    )


def what_does_not_fit(needs: Needs, plans: Placement, inventory: HostInventory) -> list[str]:
    """A line for everything that is known to be too small."""
    problems: list[str] = []
    for hosts in sorted({plan.hosts for plan in plans.values()}):
        there = {role: plan for role, plan in plans.items() if plan.hosts == hosts}
        problems += _gpus_that_are_too_small(needs, there, inventory)
        asked = sum(_host_bytes(needs, plan) for plan in there.values())
        if inventory.memory_bytes is not None and asked > inventory.memory_bytes:
            problems.append(
                f"a host of the {hosts} has {inventory.memory_bytes / GB:.1f} GB of memory, what "
                f"is on it needs {asked / GB:.1f} GB"
            )
    return problems


def _gpus_that_are_too_small(
    needs: Needs, plans: Placement, inventory: HostInventory
) -> Iterator[str]:
    for index, gpu in enumerate(inventory.gpus):
        there = [role for role, plan in plans.items() if index in plan.devices]
        asked = sum(sum(needs.per_process[role].values()) for role in there)
        if gpu.memory_bytes is not None and asked > gpu.memory_bytes:
            yield (
                f"GPU {index} has {gpu.memory_bytes / GB:.1f} GB; it needs {asked / GB:.1f} GB "
                f"and activations for {' and '.join(there)}"
            )


def with_room(weights: WeightsConfig, model_dir: Path) -> WeightsConfig:
    """Without shared memory where there is not enough of it, and `auto` leaves the choice.

    Raises:
        ConfigError: shared memory is asked for.
    """
    if weights.transport == "torchstore":
        return weights
    problem = _lack_of_shared_memory(published_memory(model_size(model_dir), weights), weights)
    if problem is None:
        return weights
    if weights.transport == "shared_memory" or weights.shared_memory_folder is not None:
        raise ConfigError(f"weights.transport: {problem}")
    logger.warning("weights.transport auto takes torchstore: %s", problem)
    return weights.model_copy(update={"transport": "torchstore"})


def _lack_of_shared_memory(needed: int, weights: WeightsConfig) -> str | None:
    folder = Path(weights.shared_memory_folder or default_root())
    free = free_bytes(folder)
    if free is None or needed <= free:
        return None
    return (
        f"{folder} has {free / GB:.2f} GB free, published weights need {needed / GB:.2f} GB; "
        "enlarge it (docker run --shm-size), or set weights.transport: torchstore"
    )


def _host_bytes(needs: Needs, plan: MeshPlan) -> int:
    """Of one host's memory."""
    on_cpu = sum(needs.per_process[plan.role].values()) if plan.device == "cpu" else 0
    if plan.role != "trainer":
        return plan.per_host * on_cpu
    return plan.per_host * (on_cpu + needs.staging) + needs.published // plan.num_hosts


def free_bytes(folder: Path) -> int | None:
    """What more fits there; None if nobody can tell."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
