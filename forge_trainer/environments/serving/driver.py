"""Agents carry episodes through: each gets a key, and fills its episode by what it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from forge_trainer.config import EnvironmentConfig
from forge_trainer.errors import ConfigError
from forge_trainer.functional.seeds import opening_seed
from forge_trainer.tasks import is_cancelled, run_with_background
from forge_trainer.types import EpisodeStatus

from ..acting import Acting
from ..failures import EpisodeError, Failures
from ..reward_calls import raised, read_number
from .agents import Call, make_agent
from .server import ChatServer
from .session import Session

REWARD = "agent"
"""What a reward without a name is called."""
LOOPBACK = "127.0.0.1"
ANY_ADDRESS = ("", "0.0.0.0", "::")


class AgentDriver:
    """Keeps `Driver` with a call of the agent for every episode, and a server for all of them."""

    def __init__(self, config: EnvironmentConfig, failures: Failures) -> None:
        """Raises ConfigError: there is no such agent, or it cannot be called."""
        options = dict(config.options)
        self._server = ChatServer(_require_host(options.pop("host", LOOPBACK)))
        self._agent = make_agent(options)
        self._failures = failures
        self._timeout_s = config.step_timeout_s

    async def drive(self, acting: Acting) -> EpisodeStatus:
        session = Session(acting, self._failures)
        async with self._server.serving(session) as api_key:
            await run_with_background(
                self._run(acting, session, api_key),
                session.watch(name=self._agent.name, timeout_s=self._timeout_s),
            )
        return session.status

    async def close(self) -> None:
        """End the server."""
        await self._server.close()

    async def _run(self, acting: Acting, session: Session, api_key: str) -> None:
        """Raises EpisodeError: the agent failed, unless it was told of a limit."""
        place = acting.place
        seed = opening_seed(acting.rules.seed, group_id=place.group_id)
        call = Call(self._server.base_url, api_key, place.prompt, seed)
        try:
            given = await self._agent.run(call)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if is_cancelled():
                raise
            if session.limit is None:
                raise self._failed(error) from error
            # Told of a limit, it may end as it likes: without a reward of its own.
            given = None
        acting.take(self._rewards(given), {"conversations": len(acting.conversations)})
        if not acting.conversations and session.limit is None:
            raise EpisodeError(self._agent.name, "ended without an answer of the model's")

    def _failed(self, error: BaseException) -> EpisodeError:
        if isinstance(error, EpisodeError):
            return error
        return EpisodeError(self._agent.name, raised(error))

    def _rewards(self, given: Any) -> dict[str, float]:
        if given is None:
            return {}
        rewards = {}
        for name, value in (given if isinstance(given, Mapping) else {REWARD: given}).items():
            number = read_number(value)
            if isinstance(number, str):
                raise EpisodeError(self._agent.name, f"{number}, as the reward {name!r}")
            rewards[str(name)] = number
        return rewards


def _require_host(host: Any) -> str:
    if not isinstance(host, str) or host in ANY_ADDRESS:
        raise ConfigError(
            f"environment.options.host is {host!r}; give the one address that agents reach this "
            f"host by, such as {LOOPBACK}"
        )
    return host
