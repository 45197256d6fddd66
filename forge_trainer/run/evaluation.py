"""Evaluation: held-out prompts in, one row of numbers out, beside training."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from forge_trainer.config import EvalConfig
from forge_trainer.functional.evaluation import mean_interval, pass_at_k
from forge_trainer.reporting import Reporter
from forge_trainer.tasks import first_error
from forge_trainer.types import Episode, Prompt

from .rollout import SampleGroup, episodes_of

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Evaluation:
    """Who is asked what, and when. Sampling has seeds of its own and changes no other."""

    config: EvalConfig
    prompts: Sequence[Prompt]
    """The same each time."""
    sample_group: SampleGroup
    _is_running: bool = False
    _last_step: int | None = None

    async def run_at_start(self, reporter: Reporter) -> None:
        """Before the first update, if asked for."""
        if self.config.at_start:
            await self.run(reporter, step=0)

    async def run_if_due(self, reporter: Reporter, *, before: int, step: int) -> None:
        """If an interval ended between the steps, unless the evaluation before is still running."""
        every = self.config.every
        if step // every <= before // every:
            return
        if self._is_running:
            logger.warning("no evaluation at step %d: the one before is still running", step)
            return
        await self.run(reporter, step=step)

    async def run_at_end(self, reporter: Reporter, *, step: int) -> None:
        """Of the last step, if it has not been evaluated."""
        if self._last_step != step:
            await self.run(reporter, step=step)

    async def run(self, reporter: Reporter, *, step: int) -> dict[str, float]:
        """Ask everything at once; the row, which is also reported.

        New weights may arrive meanwhile: the row says which versions have answered.
        """
        start = time.perf_counter()
        self._is_running, self._last_step = True, step
        async with first_error() as asking:
            tasks = [
                asking.create_task(self._ask(prompt, index), name=f"eval {index}")
                for index, prompt in enumerate(self.prompts)
            ]
        self._is_running = False
        groups = [group for task in tasks if (group := task.result())]
        row = {"step": float(step), **evaluation_metrics(groups, self.config)}
        row["eval/failed_prompts"] = float(len(self.prompts) - len(groups))
        row["time/eval_s"] = time.perf_counter() - start
        reporter.report_evaluation(row)
        return row

    async def _ask(self, prompt: Prompt, index: int) -> Sequence[Episode] | None:
        return await self.sample_group(prompt, index)


def evaluation_metrics(groups: Sequence[Sequence[Episode]], config: EvalConfig) -> dict[str, float]:
    """Means, intervals and pass@k of what was answered; nothing of what failed."""
    counted = [kept for group in groups if (kept := [e for e in group if not e.excluded])]
    if not counted:
        return {"eval/prompts": 0.0}
    reward = mean_interval([[e.reward for e in group] for group in counted])
    episodes = list(episodes_of(counted))
    row = {
        "eval/prompts": float(len(counted)),
        "eval/reward": reward.mean,
        "eval/reward_low": reward.low,
        "eval/reward_high": reward.high,
        "eval/completed": _mean([float(e.status == "completed") for e in episodes]),
        "eval/completion_tokens": _mean([float(e.num_sampled) for e in episodes]),
        "eval/version_min": float(min(e.policy_version for e in episodes)),
        "eval/version_max": float(max(_newest(e) for e in episodes)),
    }
    whole = [group for group in counted if len(group) == config.completions]
    right = [sum(e.reward >= config.pass_reward for e in group) for group in whole]
    for k in config.pass_at if whole else ():
        row[f"eval/pass@{k}"] = pass_at_k(right, n=config.completions, k=k)
    names = {name for e in episodes for name in e.rewards}
    for name in sorted(names):
        values = [e.rewards[name] for e in episodes if name in e.rewards]
        row[f"eval/reward/{name}"] = _mean(values)
    return row


def _newest(episode: Episode) -> int:
    return max(int(max(transcript.policy_versions)) for transcript in episode.transcripts)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
