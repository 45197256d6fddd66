"""How soon the tiny task is learned with rollout in turn, one batch and two batches ahead.

Whole runs of configs/grpo_tiny.yaml, each in a process of its own, in turn; the clock begins with
the first step. Reward is the mean of ten steps.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from apps.bench.measure import Row, Spread

CONFIG = "configs/grpo_tiny.yaml"
GOAL, SMOOTHED_STEPS, SEEDS = 0.8, 10, 3
NEVER_S = float("inf")


async def run() -> list[Row]:
    """Every staleness with every seed."""
    found: dict[int, list[list[Mapping[str, float]]]] = {S: [] for S in (0, 1, 2)}
    with tempfile.TemporaryDirectory() as scratch:
        for seed, S in itertools.product(range(SEEDS), found):
            found[S].append(_rows_of_a_run(Path(scratch) / f"{seed}-{S}", seed, S))
    rows = []
    for S, runs in found.items():
        to_goal = [seconds_to_goal(steps) for steps in runs]
        rows += [
            Row(f"seconds_to_goal_S{S}", f"to reward {GOAL}, S = {S}", Spread.of(to_goal)),
            Row(f"step_s_S{S}", "a step", Spread.of([_median(r, "time/step_s") for r in runs])),
        ]
    ahead = found[1]
    stalls = [_share(steps, "weights/stall_s") for steps in ahead]
    waits = [_share(steps, "time/wait_rollout_s") for steps in ahead]
    return [
        *rows,
        Row("stall_share", "S = 1: stall / step", Spread.of(stalls), bar=0.02),
        Row("wait_share", "S = 1: the trainer's wait for rollout / step", Spread.of(waits)),
    ]


def _rows_of_a_run(folder: Path, seed: int, max_staleness: int) -> list[Mapping[str, float]]:
    options = {
        "run.folder": folder,
        "run.seed": seed,
        "run.export": "false",
        "async.max_staleness": max_staleness,
        "reporting.console": "false",
        "reporting.tensorboard": "false",
    }
    given = [f"--{key}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", "apps.grpo.main", "--config", CONFIG, *given]
    subprocess.run(command, check=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def seconds_to_goal(steps: Sequence[Mapping[str, float]]) -> float:
    """The time of all steps until the smoothed reward is there; infinite if it never is."""
    elapsed = 0.0
    for number, row in enumerate(steps, 1):
        elapsed += row["time/step_s"]
        recent = [row["reward/mean"] for row in steps[max(0, number - SMOOTHED_STEPS) : number]]
        if len(recent) == SMOOTHED_STEPS and statistics.fmean(recent) >= GOAL:
            return elapsed
    return NEVER_S


def _median(steps: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.median(row[key] for row in steps)


def _share(steps: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.median(row.get(key, 0.0) / row["time/step_s"] for row in steps)
