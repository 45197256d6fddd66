"""What a config would start, and what of it does not fit; nothing is started."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from apps.grpo.fits import checked_model, placed
from apps.grpo.parts import make_rollouts
from forge_trainer.config import GrpoConfig
from forge_trainer.controller.checks import check_algorithm
from forge_trainer.processes.hosts.inventory import find_inventory
from forge_trainer.processes.hosts.needs import (
    Needs,
    model_size,
    needs_of,
    what_does_not_fit,
    with_room,
)
from forge_trainer.processes.hosts.placement import Placement
from forge_trainer.types import HostInventory

FITS, DOES_NOT_FIT = 0, 2


def dry_run(config: GrpoConfig, inventory: HostInventory | None = None) -> int:
    """Print it; the exit code, 2 if something does not fit.

    Raises:
        ConfigError: the config cannot work at all.
    """
    inventory = inventory or find_inventory(config.launch)
    check_algorithm(config.algorithm)
    plans = placed(config, inventory)
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = checked_model(config, Path(scratch), inventory)
        make_rollouts(config, model_dir)
        model = model_size(model_dir)
        if config.launch.kind == "local":
            with_room(config.weights, model_dir)
    algorithm = config.algorithm
    needs = needs_of(
        model,
        config.trainers,
        config.generator,
        config.weights,
        rows=algorithm.groups_per_step * algorithm.group_size,
    )
    problems = what_does_not_fit(needs, plans, inventory)
    console = Console(width=100)
    console.print(_table(plans, needs))
    console.print(
        f"{model.num_parameters:,} parameters; staging {_size(needs.staging)} of the host for each "
        f"publishing rank; published versions {_size(needs.published)}; activations come on top"
    )
    for problem in problems:
        console.print(f"does not fit: {problem}", soft_wrap=True)
    return DOES_NOT_FIT if problems else FITS


def _table(plans: Placement, needs: Needs) -> Table:
    table = Table(title="nothing was started")
    for column in ("mesh", "processes", "hosts", "GPUs", "memory of each process"):
        table.add_column(column)
    for role, plan in plans.items():
        parts = needs.per_process[role]
        table.add_row(
            role,
            str(plan.num_processes),
            f"{plan.num_hosts} of the {plan.hosts}",
            ", ".join(map(str, plan.devices)) or f"none, {plan.cpu_threads} threads",
            f"{_size(sum(parts.values()))}: "
            + ", ".join(f"{name} {_size(size)}" for name, size in parts.items()),
        )
    return table


def _size(number: int) -> str:
    """In decimal units."""
    for unit, width in (("GB", 1e9), ("MB", 1e6)):
        if number >= width:
            return f"{number / width:.1f} {unit}"
    return f"{number / 1e3:.0f} kB"
