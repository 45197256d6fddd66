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
    from forge_trainer.data.prompts import Task
    from forge_trainer.processes.lifecycle import Site
    from forge_trainer.reporting import Reporter


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
    from forge_trainer.config.load import dump_config
    from forge_trainer.controller.checks import (
        check_algorithm,
        check_checkpoint_folder,
        check_port,
        check_prompts,
    )
    from forge_trainer.data.prompts import make_task
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
    task = make_task(config.task, seed=config.run.seed)
    with tempfile.TemporaryDirectory() as scratch:
        # Made elsewhere, so that a config that cannot work leaves the run folder as it was.
        model_dir = checked_model(config, Path(scratch), inventory)
        task = check_prompts(task, model_dir, config.generator)
        folder = prepare_run_folder(config.run, keep=model_dir)
        dump_config(config, folder / CONFIG_FILE)
        if config.model.tiny is not None:
            model_dir = Path(shutil.copytree(scratch, folder / MODEL_FOLDER))
    asyncio.run(train(config, model_dir, folder, task))


async def train(config: GrpoConfig, model_dir: Path, folder: Path, task: Task) -> None:
    """Start the processes and run both loops until the steps are done."""
    from forge_trainer.processes.lifecycle import running_services
    from forge_trainer.replay import Replay
    from forge_trainer.reporting.files import write_facts
    from forge_trainer.run.pipeline import Pipeline
    from forge_trainer.run.rollout import run_rollout
    from forge_trainer.run.run_folder import (
        CHECKPOINTS_FOLDER,
        FACTS_FILE,
        FINAL_FOLDER,
    )
    from forge_trainer.run.training import Models, TrainPlan, leave_model, run_training
    from forge_trainer.tasks import run_with_background
    from forge_trainer.types import SamplingParams

    algorithm = config.algorithm
    replay = Replay(max_policy_age=algorithm.max_policy_age, seed=config.run.seed)
    pipeline = Pipeline(
        replay,
        groups_per_step=algorithm.groups_per_step,
        max_policy_age=algorithm.max_policy_age,
        updates_per_batch=algorithm.updates_per_batch,
    )
    sampling = SamplingParams(
        max_completion_tokens=config.generator.max_completion_tokens,
        temperature=config.generator.temperature,
        num_completions=algorithm.group_size,
        stop=config.generator.stop,
    )
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
            rollout = run_rollout(
                services.generator,
                task,
                pipeline,
                sampling=sampling,
                groups_per_step=algorithm.groups_per_step,
            )
            models = Models(services.trainer, services.generator, services.reference)
            training = run_training(models, pipeline, reporter, TrainPlan.of(config))
            await run_with_background(training, rollout)
            if config.run.export:
                await leave_model(services.trainer, folder / FINAL_FOLDER)
    finally:
        reporter.close()


def site_of(config: GrpoConfig, folder: Path) -> Site:
    """Where the run's processes live, and where they log."""
    from forge_trainer.processes.lifecycle import Site
    from forge_trainer.processes.rank_logs import RankLogs
    from forge_trainer.run.run_folder import LOGS_FOLDER

    logs = RankLogs(str((folder / LOGS_FOLDER).absolute()), config.reporting.log_level)
    return Site(config.launch, config.placement, logs)


def make_reporter(config: GrpoConfig, folder: Path) -> Reporter:
    """All sinks that the config asks for."""
    from forge_trainer.reporting import Reporter, Sink
    from forge_trainer.reporting.console import ConsoleSink, SummarySink
    from forge_trainer.reporting.files import MetricsFile, RolloutsFile, TensorBoardSink
    from forge_trainer.run.run_folder import (
        FINAL_FOLDER,
        METRICS_FILE,
        ROLLOUTS_FILE,
        TENSORBOARD_FOLDER,
    )

    sinks: list[Sink] = [
        MetricsFile(folder / METRICS_FILE),
        RolloutsFile(folder / ROLLOUTS_FILE, per_step=config.reporting.rollouts_per_step),
    ]
    if config.reporting.tensorboard:
        sinks.append(TensorBoardSink(folder / TENSORBOARD_FOLDER))
    if config.reporting.console:
        sinks += [SummarySink(folder, folder / FINAL_FOLDER), ConsoleSink(steps=config.run.steps)]
    return Reporter(sinks)


if __name__ == "__main__":
    sys.exit(main())
