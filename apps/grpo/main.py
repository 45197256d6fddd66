"""GRPO from a config file: config, processes, loops.

    python -m apps.grpo.main --config configs/grpo_tiny.yaml [--overwrite] [--dry-run]
        [--section.key value]

Exit codes: 0 done, 1 failed, 2 the config cannot work, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from apps.command_line import run_app
from forge_trainer.config import GrpoConfig

if TYPE_CHECKING:
    from apps.grpo.parts import Rollouts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the app; the process's exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    return run_app("apps.grpo.main", GrpoConfig, given, start, dry_run=look)


def look(config: GrpoConfig) -> int:
    """What the config would start, and what of it does not fit; the exit code."""
    from apps.grpo.dry_run import dry_run

    return dry_run(config)


def start(config: GrpoConfig) -> None:
    """Check everything that can be checked without processes, then train.

    Raises:
        ConfigError: before anything was started.
    """
    import shutil
    import tempfile

    from apps.grpo.fits import checked_model, placed
    from apps.grpo.parts import make_rollouts
    from forge_trainer.config.load import dump_config
    from forge_trainer.controller.checks import (
        check_algorithm,
        check_checkpoint_folder,
        check_port,
    )
    from forge_trainer.processes.hosts.certificates import use_certificates
    from forge_trainer.processes.hosts.inventory import find_inventory
    from forge_trainer.run.run_folder import (
        CONFIG_FILE,
        MODEL_FOLDER,
        prepare_run_folder,
        refuse_places_of_the_run,
    )

    # Before anything imports Monarch.
    use_certificates(config.launch.tls)
    check_algorithm(config.algorithm)
    check_checkpoint_folder(config.trainer)
    inventory = find_inventory(config.launch)
    placed(config, inventory)
    if config.launch.kind == "local":
        check_port(config.trainer)
    refuse_places_of_the_run(config)
    with tempfile.TemporaryDirectory() as scratch:
        # Made elsewhere, so that a config that cannot work leaves the run folder as it was.
        model_dir = checked_model(config, Path(scratch), inventory)
        rollouts = make_rollouts(config, model_dir)
        folder = prepare_run_folder(config.run, keep=model_dir)
        dump_config(config, folder / CONFIG_FILE)
        if config.model.tiny is not None:
            model_dir = Path(shutil.copytree(scratch, folder / MODEL_FOLDER))
    asyncio.run(train(config, model_dir, folder, rollouts))


async def train(config: GrpoConfig, model_dir: Path, folder: Path, rollouts: Rollouts) -> None:
    """Start the processes and run both loops until the steps are done."""
    from apps.grpo.parts import make_replay, make_reporter, sampler, site_of
    from forge_trainer.processes.lifecycle import running_services
    from forge_trainer.reporting.files import write_facts
    from forge_trainer.run.pipeline import Pipeline
    from forge_trainer.run.rollout import run_rollout
    from forge_trainer.run.run_folder import CHECKPOINTS_FOLDER, FACTS_FILE, FINAL_FOLDER
    from forge_trainer.run.training import Models, TrainPlan, Watchers, leave_model, run_training
    from forge_trainer.tasks import run_with_background

    pipeline = Pipeline(make_replay(config))
    checkpoints = Path(config.trainer.checkpoint_folder or folder / CHECKPOINTS_FOLDER)
    reporter = make_reporter(config, folder)
    try:
        async with running_services(
            config.trainer,
            config.seeded_generator,
            config.weights,
            model_dir=model_dir,
            checkpoint_folder=checkpoints,
            reference=config.reference_trainer if config.needs_reference else None,
            site=site_of(config, folder),
        ) as services:
            write_facts(await services.trainer.get_config(), folder / FACTS_FILE)
            generator = services.generator
            sample = sampler(rollouts.runner, generator, config.algorithm.group_size)
            rollout = run_rollout(rollouts.task.prompts, sample, pipeline)
            models = Models(services.trainer, generator, services.reference)
            watchers = Watchers(reporter, rollouts.evaluation(generator), rollouts.counts)
            training = run_training(models, pipeline, watchers, TrainPlan.of(config))
            await run_with_background(training, rollout)
            if config.run.export:
                await leave_model(services.trainer, folder / FINAL_FOLDER)
    finally:
        reporter.close()
        await rollouts.close()


if __name__ == "__main__":
    sys.exit(main())
