"""Tasks to act in: renderer, limits, rewards, and the rollout of one episode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge_trainer.config import EnvironmentConfig
from forge_trainer.types import SamplingParams

from .acting import ActingRules, Generate
from .episodes import Driver, EpisodeRunner
from .failures import Failures
from .guarded import EnvironmentDriver
from .renderer import make_renderer
from .resolve import AGENT, environment_maker
from .rubric import make_rubric

__all__ = ["EpisodeRunner", "Generate", "make_episode_runner"]


def make_episode_runner(
    config: EnvironmentConfig,
    task_reward: Callable[..., Any] | None,
    *,
    model_dir: Path,
    sampling: SamplingParams,
    max_prompt_tokens: int,
    seed: int,
) -> EpisodeRunner:
    """What runs the episodes that the config describes. Starts nothing.

    `sampling` is of every message of the model's, `max_prompt_tokens` of every request.

    Raises:
        ConfigError: environment, renderer or a reward cannot be had.
    """
    rules = ActingRules(
        limits=config,
        renderer=make_renderer(config, model_dir),
        sampling=sampling,
        max_prompt_tokens=max_prompt_tokens,
        seed=seed,
    )
    failures = Failures()
    rubric = make_rubric(config, task_reward, failures)
    return EpisodeRunner(_make_driver(config, failures), rules, rubric)


def _make_driver(config: EnvironmentConfig, failures: Failures) -> Driver:
    if config.name == AGENT:
        # An HTTP server is imported only for those who serve.
        from .serving.driver import AgentDriver

        return AgentDriver(config, failures)
    # "package.module:Name" is counted as Name.
    name = config.name.rpartition(":")[2]
    make = environment_maker(config)
    return EnvironmentDriver(make, failures, name=name, timeout_s=config.step_timeout_s)
