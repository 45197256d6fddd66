"""What a whole GRPO step costs, generation included, against TRL's GRPOTrainer on the same work.

    uv run --with trl python -m apps.bench.main --suite trl

The work is that of configs/grpo_tiny.yaml: 32 prompts with 8 completions of one token each,
reward, advantages, one update. TRL does it in one process with a thread per core; here two trainer
ranks and a generator take turns in processes of their own, and weights travel between them.
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

from apps.bench.measure import Row, Spread, ratios
from forge_trainer.config import GrpoConfig
from forge_trainer.config.load import load_config
from forge_trainer.data.prompts import Task, make_task
from forge_trainer.hf import create_tiny_model
from forge_trainer.processes.lifecycle import Services, running_services
from forge_trainer.run.rollout import judge_group
from forge_trainer.run.training import sequences_of
from forge_trainer.run.weight_sync import sync_weights
from forge_trainer.types import SamplingParams

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
            task = make_task(config.task, seed=0)
            blocks = [(await _our_block(services, task, config), trl_block())]
            for _ in range(BLOCKS):
                blocks.append((await _our_block(services, task, config), trl_block()))
    pairs = blocks[1:]
    return [
        Row("step_over_trl", "a GRPO step, ours / TRL's", ratios(pairs), bar=1.0),
        Row("step_s", "seconds of ours", Spread.of([ours for ours, _ in pairs])),
        Row("trl_step_s", "seconds of TRL's", Spread.of([theirs for _, theirs in pairs])),
    ]


async def _our_block(services: Services, task: Task, config: GrpoConfig) -> float:
    algorithm, times = config.algorithm, []
    sampling = SamplingParams(
        max_completion_tokens=config.generator.max_completion_tokens,
        num_completions=algorithm.group_size,
    )
    for _ in range(STEPS):
        start = time.perf_counter()
        prompts = list(itertools.islice(task.prompts, algorithm.groups_per_step))
        completions = await services.generator.generate([p.text for p in prompts], sampling)
        groups = [
            judge_group(prompt, group, task.reward, number)
            for number, (prompt, group) in enumerate(zip(prompts, completions, strict=True))
        ]
        await services.trainer.train_step(sequences_of(groups, algorithm), loss=algorithm.loss)
        await sync_weights(services.trainer, services.generator)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARMUP:])


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
