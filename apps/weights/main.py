"""Did the weights arrive? Published ones against a generator's and those on disk.

    python -m apps.weights.main verify --config FILE [--checkpoint PATH] [--section.key value]

Exit codes: 0 all tensors are equal, 1 some differ or it failed, 2 the config cannot work,
130 stopped with Ctrl-C, 143 with SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from apps.command_line import BAD_CONFIG, FAILED, OK, run, run_app
from forge_trainer.config import GrpoConfig, ProfilingConfig
from forge_trainer.errors import ConfigError

if TYPE_CHECKING:
    from forge_trainer.run.compare import Comparison
    from forge_trainer.run.weight_sources import HeldWeights

MODULE = "apps.weights.main"
USAGE = f"python -m {MODULE} verify --config FILE [--checkpoint PATH] [--section.key VALUE ...]"
ABOUT = """\
Starts the trainer and the generators of a run's config, publishes the weights, lets the generators
pull them, and compares the published ones, tensor by tensor, with those that each generator runs on
and with those on disk. The run folder is left as it is; a run may go on
meanwhile, if there is memory for both.

--checkpoint PATH   what the trainer loads and what is compared with: a checkpoint, or a Hugging
                    Face directory or export. Without it: the model that the config gives. A tiny
                    model is that of the run folder, or if there is none, made again.

Exit codes: 0 all tensors are equal, 1 some differ or it failed, 2 the config cannot work.
All other keys are those of a run:"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the app; the process's exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] in (["-h"], ["--help"]):
        given = ["verify", *given]
    if given[:1] != ["verify"]:
        print(f"usage: {USAGE}", file=sys.stderr)
        return BAD_CONFIG
    parser = argparse.ArgumentParser(prog=MODULE, usage=USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("--checkpoint", type=Path)
    own, options = parser.parse_known_args(given[1:])
    start = functools.partial(verify, checkpoint=own.checkpoint)
    return run_app(MODULE, GrpoConfig, options, start, usage=USAGE, about=ABOUT)


def verify(config: GrpoConfig, checkpoint: Path | None) -> int:
    """Check everything that can be checked without processes, then compare; the exit code.

    Raises:
        ConfigError: before any process was started.
        CheckpointError: the checkpoint is damaged or of another model; before that, too.
    """
    import tempfile

    from forge_trainer.controller.checks import check_models
    from forge_trainer.run.weight_sources import checkpoint_format

    if config.launch.kind != "local":
        raise ConfigError(
            f"launch.kind: {config.launch.kind}, but this app works on one machine; give "
            "--launch.kind local, and what fits on it"
        )
    kind = None if checkpoint is None else checkpoint_format(checkpoint)
    with tempfile.TemporaryDirectory() as scratch:
        if checkpoint is not None and kind == "hf":
            # A trainer starts from a directory instead of loading it.
            model_dir = checkpoint
        else:
            model_dir = find_model(config, Path(scratch))
        try:
            check_models(model_dir, config.trainers.values(), config.generator, config.weights)
        except ConfigError as error:
            if model_dir == checkpoint:
                raise ConfigError(f"--checkpoint {checkpoint}: {error}") from error
            raise
        load = None if kind in (None, "hf") else checkpoint
        return report(run(compare(config, model_dir.resolve(), load)))


def find_model(config: GrpoConfig, scratch: Path) -> Path:
    """The directory of the run's model; a tiny one is the run folder's, or made in `scratch`."""
    from forge_trainer.hf import model_directory
    from forge_trainer.run.run_folder import MODEL_FOLDER

    of_run = Path(config.run.folder) / MODEL_FOLDER
    if config.model.tiny is not None and of_run.is_dir():
        return of_run
    if config.model.tiny is not None:
        say("note", f"{of_run} does not exist; a model is made from model.tiny and run.seed")
    return model_directory(config.model, scratch, seed=config.run.seed)


async def compare(config: GrpoConfig, model_dir: Path, checkpoint: Path | None) -> list[Comparison]:
    """Published weights against the generator's, and against those on disk."""
    from forge_trainer.processes.lifecycle import Site, running_services
    from forge_trainer.run.compare import compare_weights
    from forge_trainer.run.weight_sources import GeneratorWeights, PublishedWeights
    from forge_trainer.weights.stores import open_store

    on_disk = await read_weights_on_disk(config, model_dir, checkpoint)
    # A trainer that is never stepped needs no optimizer; its port may be that of a run.
    alone = {"trainable": False, "master_port": None, "profiling": ProfilingConfig()}
    async with running_services(
        config.trainer.model_copy(update=alone),
        config.seeded_generator,
        config.weights,
        model_dir=model_dir,
        checkpoint_folder=model_dir,
        site=Site(placement=config.placement),
    ) as services:
        if checkpoint is not None:
            await services.trainer.load(path=str(checkpoint.resolve()), weights_only=True)
        ref = await services.trainer.push_weights()
        async with open_store(services.store.address, config.weights).reading(ref.version) as held:
            say(
                "published",
                f"{ref.version} by {config.trainer.num_ranks} ranks, {ref.num_tensors} tensors, "
                f"{ref.num_bytes / 1e6:.1f} MB in {ref.dtype}, through {ref.transport}",
            )
            # Each by itself: a fleet would go on without one that is late, or lost.
            replicas = services.generator.replicas
            pulls = (one.pull_weights(ref) for one in replicas.values())
            for name, pulled in zip(replicas, await asyncio.gather(*pulls), strict=True):
                say(name, f"{pulled}, pulled")
            generators = [GeneratorWeights(one, name) for name, one in replicas.items()]
            return await compare_weights(PublishedWeights(held), [*generators, on_disk])


async def read_weights_on_disk(
    config: GrpoConfig, model_dir: Path, checkpoint: Path | None
) -> HeldWeights:
    import torch

    from forge_trainer.run.weight_sources import HeldWeights, read_checkpoint

    source = model_dir if checkpoint is None else checkpoint
    label = "model" if checkpoint is None else "checkpoint"
    dtype: torch.dtype = getattr(torch, config.weights.dtype)
    tensors = await read_checkpoint(
        source, model_dir=model_dir, trainer=config.trainer, dtype=dtype
    )
    say(label, f"{source}, {len(tensors)} tensors")
    return HeldWeights(label, tensors)


def say(label: str, what: str) -> None:
    print(f"{label:<10}  {what}", flush=True)


def report(comparisons: Sequence[Comparison]) -> int:
    """Say what is different; the exit code."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from forge_trainer.run.compare import FIRST

    if not any(comparison.differences for comparison in comparisons):
        print(f"all {comparisons[0].num_tensors} tensors are equal")
        return OK
    table = Table(box=box.SIMPLE)
    table.add_column("tensor", no_wrap=True)
    table.add_column("between")
    table.add_column("difference")
    for one in comparisons:
        for difference in one.differences[:FIRST]:
            sides = f"{one.reference} and {one.other}"
            table.add_row(difference.name, sides, one.explain(difference))
    # A terminal may wrap lines; a file keeps them whole.
    Console(markup=False, width=None if sys.stdout.isatty() else 200).print(table)
    for one in comparisons:
        number, both = len(one.differences), f"{one.reference} and {one.other}"
        rest = f"; the first {FIRST} are shown" if number > FIRST else ""
        print(f"{both}: {number} of {one.num_tensors} tensors differ{rest}")
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
