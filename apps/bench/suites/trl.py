"""What a whole GRPO step costs, generation included, against TRL's GRPOTrainer on the same work.

    uv run --with trl python -m apps.bench.main --suite trl

The work is that of configs/grpo_tiny.yaml: 32 prompts with 8 completions of one token each,
reward, advantages, one update. TRL does it in one process with a thread per core; here two trainer
ranks and a generator work in processes of their own, in turn (S = 0) or with rollout one batch
ahead (S = 1), and weights travel between them.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from apps.bench.measure import Row, Spread, StepRows, ratios
from apps.grpo.parts import Rollouts, make_replay, make_rollouts, sampler
from forge_trainer.config import GrpoConfig
from forge_trainer.config.load import load_config
from forge_trainer.data.prompts import make_task
from forge_trainer.hf import create_tiny_model
from forge_trainer.processes.lifecycle import Services, running_services
from forge_trainer.reporting import Reporter
from forge_trainer.run.pipeline import Pipeline
from forge_trainer.run.rollout import run_rollout
from forge_trainer.run.training import Models, TrainPlan, Watchers, run_training
from forge_trainer.tasks import run_with_background

CONFIG = "configs/grpo_tiny.yaml"
BLOCKS, STEPS, WARMUP = 7, 12, 4
THREADS = 2


async def run() -> list[Row]:
    """Blocks of steps, taken in turn; the median of each block counts. Nothing without TRL."""
    try:
        import trl  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError as error:
        raise SystemExit("install TRL for this suite: uv run --with trl ...") from error
    config = load_config(GrpoConfig, CONFIG)
    assert config.model.tiny is not None
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = create_tiny_model(Path(scratch) / "model", config.model.tiny, seed=0)
        trl_block = _trl(config, model_dir, Path(scratch))
        async with running_services(
            config.trainer,
            config.generator,
            config.weights,
            model_dir=model_dir,
            checkpoint_folder=Path(scratch) / "checkpoints",
        ) as services:
            rollouts = make_rollouts(config, model_dir)
            blocks = []
            for _ in range(BLOCKS + 1):
                in_turn = await _our_block(services, rollouts, config, 0)
                ahead = await _our_block(services, rollouts, config, 1)
                blocks.append((ahead, trl_block(), in_turn))
            await rollouts.close()
    rounds = blocks[1:]
    in_turn_rounds = [(in_turn, theirs) for _, theirs, in_turn in rounds]
    return [
        Row("step_over_trl", "a GRPO step, ours with S = 1 / TRL's", ratios(rounds), bar=1.0),
        Row("in_turn_over_trl", "the same with S = 0", ratios(in_turn_rounds)),
        Row("step_s", "seconds of ours, S = 1", Spread.of([ours for ours, *_ in rounds])),
        Row("in_turn_step_s", "seconds of ours, S = 0", Spread.of([one for *_, one in rounds])),
        Row("trl_step_s", "seconds of TRL's", Spread.of([theirs for _, theirs, _ in rounds])),
    ]


async def _our_block(
    services: Services, rollouts: Rollouts, config: GrpoConfig, max_staleness: int
) -> float:
    """The loops of a run, for a block of steps; the median of their seconds."""
    trainer, generator = services.trainer, services.generator
    rows = StepRows()
    ahead = config.async_.model_copy(update={"max_staleness": max_staleness})
    replay = make_replay(config.model_copy(update={"async_": ahead}))
    sample = sampler(rollouts.runner, generator, config.algorithm.group_size)
    pipeline = Pipeline(replay)
    steps = (await trainer.get_status()).step + STEPS
    training = run_training(
        Models(trainer, generator),
        pipeline,
        Watchers(Reporter([rows])),
        TrainPlan(steps, config.algorithm, checkpoint_interval=0),
    )
    await run_with_background(training, run_rollout(rollouts.task.prompts, sample, pipeline))
    return statistics.median(row["time/step_s"] for row in rows.rows[WARMUP:])


def _trl(config: GrpoConfig, model_dir: Path, scratch: Path) -> Callable[[], float]:
    """A function that trains for a block of steps and returns the median of their seconds."""
    from datasets import Dataset  # type: ignore[import-not-found,import-untyped,unused-ignore]
    from trl import GRPOConfig, GRPOTrainer

    algorithm, ends = config.algorithm, list[float]()
    task = make_task(config.task, seed=0)
    prompts = list(itertools.islice(task.prompts, algorithm.groups_per_step * STEPS))

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        ends.append(time.perf_counter())
        return [float(c.startswith(a)) for c, a in zip(completions, answer, strict=True)]

    warnings.simplefilter("ignore", FutureWarning)
    trainer = GRPOTrainer(
        model=str(model_dir),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=str(scratch / "trl"),
            per_device_train_batch_size=algorithm.episodes_per_batch,
            num_generations=algorithm.group_size,
            max_completion_length=config.generator.max_completion_tokens,
            max_steps=STEPS,
            learning_rate=config.trainer.optimizer.lr,
            lr_scheduler_type="constant",
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [p.text for p in prompts], "answer": [p.answer for p in prompts]}
        ),
    )

    def block() -> float:
        ends.clear()
        threads = torch.get_num_threads()
        torch.set_num_threads(THREADS)
        trainer.train()
        torch.set_num_threads(threads)
        # From one call of the reward to the next is one step.
        times = [after - before for before, after in itertools.pairwise(ends)]
        return statistics.median(times[WARMUP:])

    return block
