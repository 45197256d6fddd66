"""Calling an agent: a function of the user's, on the event loop or a thread, or a command.

It is told where to ask for completions, with which key, and what the task is. What it gives back
is a reward, several by name, or nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from forge_trainer.errors import ConfigError
from forge_trainer.functional.named import import_callable, is_async
from forge_trainer.types import Prompt

from ..failures import EpisodeError
from ..reward_calls import raised

TOLD_OF_STDERR = 2000
"""Characters of what a command that failed said last."""


@dataclass(frozen=True, slots=True)
class Call:
    """One episode, as an agent is told of it."""

    base_url: str
    api_key: str
    prompt: Prompt
    seed: int
    """The same for all episodes of a group."""


class Agent(Protocol):
    """Something that can be called."""

    @property
    def name(self) -> str:
        """What its failures are counted as."""
        ...

    async def run(self, call: Call) -> Any:
        """What it gives back. Cancelled, it ends, as far as it can be ended; raises anything."""
        ...


def make_agent(options: Mapping[str, Any]) -> Agent:
    """The agent that `environment.options` names; what else is in them goes to it.

    Raises:
        ConfigError: there is none, or it does not take what it would be given.
    """
    left = dict(options)
    function, command = left.pop("function", None), left.pop("command", None)
    if (function is None) == (command is None):
        raise ConfigError(
            "environment.options: an agent is either `function`, as 'package.module:name', or "
            f"`command`, as a list of words; got {sorted(options)}"
        )
    if command is not None:
        return CommandAgent(_require_words(command), left)
    found = import_callable("environment.options.function", str(function))
    takes_seed = _require_call(str(function), found, left)
    kind = AsyncAgent if is_async(found) else ThreadAgent
    return kind(str(function).rpartition(":")[2], found, left, takes_seed)


def _require_words(command: Any) -> Sequence[str]:
    if not isinstance(command, list) or not command or not all(isinstance(w, str) for w in command):
        raise ConfigError(
            f"environment.options.command is {command!r}; a list of words is wanted, such as "
            "[python, agent.py]"
        )
    if shutil.which(command[0]) is None:
        raise ConfigError(f"environment.options.command: there is no program {command[0]!r}")
    return command


def _require_call(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> bool:
    """Whether it takes a seed, too."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        # It says nothing of its parameters.
        return False
    given = {"base_url": "", "api_key": "", "prompt": Prompt("", ""), **options}
    takes_seed = "seed" in signature.parameters
    try:
        signature.bind(**given, **({"seed": 0} if takes_seed else {}))
    except TypeError as error:
        raise ConfigError(
            f"environment.options.function: {name} cannot be called with "
            f"{', '.join(given)}: {error}"
        ) from None
    return takes_seed


@dataclass(frozen=True, slots=True)
class _FunctionAgent:
    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]
    takes_seed: bool

    def arguments(self, call: Call) -> dict[str, Any]:
        given = {"base_url": call.base_url, "api_key": call.api_key, "prompt": call.prompt}
        return given | dict(self.options) | ({"seed": call.seed} if self.takes_seed else {})


@dataclass(frozen=True, slots=True)
class AsyncAgent(_FunctionAgent):
    """An async function on the event loop of the run, which it must not hold up."""

    async def run(self, call: Call) -> Any:
        return await self.function(**self.arguments(call))


@dataclass(frozen=True, slots=True)
class ThreadAgent(_FunctionAgent):
    """A function on a thread of its own, so that as many may wait as there are episodes.

    Nothing ends a thread from outside. One that goes on after its episode is answered nothing any
    more, and does not keep the process from exiting.
    """

    async def run(self, call: Call) -> Any:
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()
        thread = threading.Thread(
            target=self._run, args=(call, outcome), name=f"agent {self.name}", daemon=True
        )
        thread.start()
        return await asyncio.wrap_future(outcome)

    def _run(self, call: Call, outcome: Future[Any]) -> None:
        try:
            outcome.set_result(self.function(**self.arguments(call)))
        except BaseException as error:
            # Whatever it is: SystemExit is to end the episode, and a future takes no StopIteration.
            failed = EpisodeError(self.name, raised(error))
            failed.__cause__ = error
            outcome.set_exception(failed)


@dataclass(frozen=True, slots=True)
class CommandAgent:
    """A process for every episode.

    OPENAI_BASE_URL and OPENAI_API_KEY are in its environment, which OpenAI's clients look for. On
    stdin it finds a JSON object of prompt, seed and options; the last line that it prints, if any,
    is what it gives back, as JSON. It has failed if it exits with another code than 0. Where its
    episode is over before, it is killed, with all that it has started in its process group.
    """

    words: Sequence[str]
    options: Mapping[str, Any]
    name: str = "agent"

    async def run(self, call: Call) -> Any:
        process = await asyncio.create_subprocess_exec(
            *self.words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": call.base_url, "OPENAI_API_KEY": call.api_key},
            start_new_session=True,
        )
        try:
            told, complaints = await process.communicate(self._task(call))
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            said = complaints.decode(errors="replace").strip()[-TOLD_OF_STDERR:]
            raise EpisodeError(self.name, f"ended with exit code {process.returncode}: {said}")
        return self._given(told.decode(errors="replace"))

    def _task(self, call: Call) -> bytes:
        task = {"prompt": dataclasses.asdict(call.prompt), "seed": call.seed}
        return json.dumps(task | {"options": dict(self.options)}).encode()

    def _given(self, told: str) -> Any:
        lines = (line for line in reversed(told.split("\n")) if line.strip())
        last = next(lines, "null")
        try:
            return json.loads(last)
        except ValueError:
            what = f"printed {last[:80]!r} last; it must be a reward, as JSON, or nothing at all"
            raise EpisodeError(self.name, what) from None
