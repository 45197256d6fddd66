"""An environment as what drives episodes: what it answers is checked, in time, or it has failed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from forge_trainer.protocols import Environment
from forge_trainer.tasks import to_the_end
from forge_trainer.types import EpisodeStatus, Message, Opening, Prompt, Reply, StopReason

from .acting import Acting
from .failures import EpisodeError, Failures, within
from .reward_calls import raised, read_number

T = TypeVar("T")


class EnvironmentDriver:
    """Keeps `Driver` with an environment for every episode."""

    def __init__(
        self,
        make: Callable[[], Environment],
        failures: Failures,
        *,
        name: str,
        timeout_s: float,
    ) -> None:
        self._make = make
        self._failures = failures
        self._name = name
        self._timeout_s = timeout_s

    async def drive(self, acting: Acting) -> EpisodeStatus:
        environment = GuardedEnvironment(self._make, name=self._name, timeout_s=self._timeout_s)
        try:
            return await acting.act(environment)
        finally:
            # A limit on the episode's time may cut short what came before, but not this.
            await to_the_end(self._close(environment))

    async def close(self) -> None:
        pass

    async def _close(self, environment: GuardedEnvironment) -> None:
        """What fails here has no bearing on the episode."""
        try:
            await environment.close()
        except EpisodeError as failed:
            self._failures.count(failed)


class GuardedEnvironment:
    """Keeps the protocol; what its methods raise is an `EpisodeError` in the environment's name."""

    def __init__(self, make: Callable[[], Environment], *, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        try:
            self._environment = make()
        except Exception as error:
            raise EpisodeError(name, f"could not be made: {raised(error)}") from error

    async def reset(self, task: Prompt, seed: int) -> Opening:
        opening = await self._ask("reset", lambda: self._environment.reset(task, seed))
        if not isinstance(opening, Opening):
            raise EpisodeError(self._name, f"reset gave a {type(opening).__name__}, not an Opening")
        self._require_messages("reset", opening.messages)
        return opening

    async def step(self, message: Message, stop_reason: StopReason) -> Reply:
        reply = await self._ask("step", lambda: self._environment.step(message, stop_reason))
        if not isinstance(reply, Reply):
            raise EpisodeError(self._name, f"step gave a {type(reply).__name__}, not a Reply")
        try:
            self._require_numbers("reward", reply.rewards)
            self._require_numbers("metric", reply.metrics)
            if not reply.done:
                self._require_messages("step", reply.messages)
        except (AttributeError, TypeError) as error:
            raise EpisodeError(self._name, f"step gave a Reply that is none: {error}") from error
        return reply

    async def close(self) -> None:
        await self._ask("close", self._environment.close)

    async def _ask(self, verb: str, ask: Callable[[], Awaitable[T]]) -> T:
        return await within(self._timeout_s, ask, name=self._name, verb=verb)

    def _require_messages(self, verb: str, messages: Sequence[Any]) -> None:
        """The model can go on from them."""
        if not messages:
            raise EpisodeError(self._name, f"{verb} gave no message to go on from, and is not done")
        for message in messages:
            if not isinstance(message, Message):
                raise EpisodeError(
                    self._name, f"{verb} gave a {type(message).__name__} as a Message"
                )
        # An opening may hold examples of answers.
        for message in messages[-1:] if verb == "reset" else messages:
            if message.role == "assistant":
                raise EpisodeError(self._name, f"{verb} spoke for the model, as an assistant")

    def _require_numbers(self, kind: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if not isinstance(name, str):
                raise EpisodeError(self._name, f"step gave a {kind} with the name {name!r}")
            if isinstance(answer := read_number(value), str):
                raise EpisodeError(self._name, f"step {answer}, as the {kind} {name!r}")
