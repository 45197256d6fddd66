"""Environments of other libraries, with the libraries themselves where they are installed.

They are not among the project's dependencies: `uv run --with verifiers==0.4.0 pytest ...`.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from forge_trainer.config import EnvironmentConfig
from forge_trainer.environments.resolve import environment_maker
from forge_trainer.errors import ConfigError
from forge_trainer.protocols import Environment
from forge_trainer.types import Message, Opening, Prompt, Reply
from tests.waiting import wait_until

ADAPTERS = "forge_trainer.environments.adapters"
# Deprecations among themselves are theirs.
pytestmark = pytest.mark.filterwarnings("default")


def said(text: str) -> Message:
    return Message("assistant", text)


def made(name: str, **options: Any) -> Environment:
    config = EnvironmentConfig(name=f"{ADAPTERS}.{name}", options=options)
    return environment_maker(config)()


@pytest.mark.parametrize("name", ["verifiers:Verifiers", "openenv:OpenEnv"])
def test_a_library_that_is_not_installed_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, _, _ = name.partition(":")
    monkeypatch.delitem(sys.modules, f"{ADAPTERS}.{library}", raising=False)
    for module in (library, f"{library}.v1", f"{library}.core"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"cannot be imported: import of {library}"):
        made(name)


@pytest.fixture
def additions(monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed taskset with a system's message, and what it is called."""
    vf = pytest.importorskip("verifiers.v1", reason="uv run --with verifiers==0.4.0")

    class Data(vf.TaskData):  # type: ignore[name-defined,misc]
        answer: str

    class Add(vf.Task[Data]):  # type: ignore[name-defined,misc]
        @vf.reward(weight=2.0)  # type: ignore[untyped-decorator]
        async def correct(self, trace: Any) -> float:
            return float(trace.last_reply == self.data.answer)

        @vf.metric  # type: ignore[untyped-decorator]
        async def length(self, trace: Any) -> float:
            return len(trace.last_reply)

    class Additions(vf.Taskset[Add]):  # type: ignore[name-defined,misc]
        def load(self) -> Iterable[Any]:
            for number in range(5):
                data = Data(prompt=f"{number} + 1 =", system_prompt="Add.", answer=str(number + 1))
                yield Add(data, self.config.task)

    module: Any = ModuleType("additions_taskset")
    module.Additions, module.__all__ = Additions, ["Additions"]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.__spec__ = __spec__
    module.Add = Add
    return str(module.__name__)


def test_a_verifiers_taskset_asks_and_judges(additions: str) -> None:
    from forge_trainer.environments.adapters.verifiers import prompts

    asked = list(prompts(3, additions))
    assert sorted(prompt.text for prompt in asked) == [f"{n} + 1 =" for n in range(5)]
    assert [p.text for p in asked] == [p.text for p in prompts(3, additions)]
    assert [p.text for p in asked] != [p.text for p in prompts(4, additions)]

    async def ask(text: str) -> tuple[Opening, Reply]:
        environment = made("verifiers:Verifiers", taskset=additions)
        opening = await environment.reset(asked[0], 0)
        reply = await environment.step(said(text), "stop")
        await environment.close()
        return opening, reply

    opening, right = asyncio.run(ask(asked[0].metadata["answer"]))
    assert list(opening.messages) == [Message("system", "Add."), Message("user", asked[0].text)]
    assert right == Reply(done=True, rewards={"correct": 2.0}, metrics={"length": 1.0})
    _, wrong = asyncio.run(ask("none"))
    assert wrong.rewards == {"correct": 0.0}


def test_a_verifiers_task_that_needs_more_than_text_is_refused(
    additions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_trainer.environments.adapters.verifiers import prompts

    prompt = next(prompts(0, additions))
    environment = made("verifiers:Verifiers", taskset=additions)
    monkeypatch.setattr(sys.modules[additions].Add, "NEEDS_CONTAINER", True)
    with pytest.raises(ValueError, match="Add needs a sandbox or tools; train it over HTTP"):
        asyncio.run(environment.reset(prompt, 0))


@contextmanager
def shouting_server() -> Iterator[str]:
    """The address of an OpenEnv server that says everything again, louder, and twice at most."""
    server_kit = pytest.importorskip(
        "openenv.core.env_server", reason="uv run --with openenv-core==0.3.0"
    )
    uvicorn = pytest.importorskip("uvicorn")

    class Say(server_kit.Action):  # type: ignore[name-defined,misc]
        message: str

    class Heard(server_kit.Observation):  # type: ignore[name-defined,misc]
        heard: str = ""

    class Shouting(server_kit.Environment):  # type: ignore[name-defined,misc]
        SUPPORTS_CONCURRENT_SESSIONS = True
        turns = 0

        def reset(self, seed: int | None = None, **options: Any) -> Any:
            self.turns = 0
            return Heard(heard=f"seed {seed}")

        def step(self, action: Any, **options: Any) -> Any:
            self.turns += 1
            return Heard(heard=action.message.upper(), reward=0.5, done=self.turns == 2)

        @property
        def state(self) -> Any:
            return server_kit.State()

    app = server_kit.create_app(Shouting, Say, Heard, max_concurrent_envs=4)
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        serving = threading.Thread(target=server.run, kwargs={"sockets": [place]})
        serving.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{place.getsockname()[1]}"
        finally:
            server.should_exit = True
            serving.join()


def test_an_openenv_server_is_an_environment() -> None:
    async def play(address: str) -> tuple[Opening, list[Reply]]:
        environment = made("openenv:OpenEnv", base_url=address, observation="heard")
        opening = await environment.reset(Prompt("Shout.", ""), 2**31 + 5)
        replies = [await environment.step(said(text), "stop") for text in ("hi", "ho")]
        await environment.close()
        return opening, replies

    with shouting_server() as address:
        opening, replies = asyncio.run(play(address))
    assert list(opening.messages) == [Message("user", "Shout.\nseed 5")]
    assert replies == [
        Reply((Message("user", "HI"),), rewards={"reward": 0.5}),
        Reply((Message("user", "HO"),), done=True, rewards={"reward": 0.5}),
    ]
