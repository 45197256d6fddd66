"""An environment behind an OpenEnv server (openenv-core 0.3): what the model says is an action.

environment:
  name: forge_trainer.environments.adapters.openenv:OpenEnv
  options: {base_url: "http://localhost:8000", action: message, observation: echoed_message}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from openenv.core import GenericEnvClient

from forge_trainer.types import Message, Opening, Prompt, Reply, StopReason


class OpenEnv:
    """A session of the server for every episode. Reward: `reward`, summed over steps."""

    def __init__(self, base_url: str, action: str = "message", observation: str = "") -> None:
        """`action` is the field that takes what the model says; `observation` the one that it is
        answered with, and all of them as JSON if it is empty."""
        self._base_url = base_url
        self._action = action
        self._observation = observation
        self._client: GenericEnvClient | None = None

    async def reset(self, task: Prompt, seed: int) -> Opening:
        """The prompt's text, if it has one, and what the server shows first."""
        self._client = GenericEnvClient(self._base_url)
        # Servers keep it as 32 bits.
        result = await self._client.reset(seed=seed % 2**31)
        shown = self._shown(result.observation)
        return Opening((Message("user", "\n".join(filter(None, (task.text, shown)))),))

    async def step(self, message: Message, stop_reason: StopReason) -> Reply:
        assert self._client is not None
        result = await self._client.step({self._action: message.content})
        rewards = {} if result.reward is None else {"reward": float(result.reward)}
        shown = Message("user", self._shown(result.observation))
        return Reply((shown,), done=result.done, rewards=rewards)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def _shown(self, observation: Mapping[str, Any]) -> str:
        return str(observation[self._observation]) if self._observation else json.dumps(observation)
