"""Tasks of a verifiers taskset (0.4), asked once and judged by their own rewards.

Tasks with tools, a sandbox or a harness are programs that speak to a model over HTTP; they are
refused here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.state import state_cls
from verifiers.v1.types import AssistantMessage, content_text
from verifiers.v1.utils.loaders import load_taskset, task_type, taskset_config_type

from forge_trainer.types import Message, Opening, Prompt, Reply, StopReason


def prompts(seed: int, taskset: str, config: Mapping[str, Any] | None = None) -> Iterator[Prompt]:
    """The tasks of an installed taskset, shuffled if they end; for `task.name`."""
    source = load_taskset(taskset_config_type(taskset)(id=taskset, **(config or {})))
    for task in source.shuffle(seed=seed) if source.bounded else source:
        yield Prompt(task.data.prompt_text, "", taskset, metadata=task.data.model_dump(mode="json"))


class Verifiers:
    """Takes the same `taskset` and `config` as the prompts. Rewards come weighted as it says."""

    def __init__(self, taskset: str, config: Mapping[str, Any] | None = None) -> None:
        self._kind: Any = task_type(taskset)
        self._config = taskset_config_type(taskset)(id=taskset, **(config or {})).task

    async def reset(self, task: Prompt, seed: int) -> Opening:
        data = self._kind.data_type().model_validate(task.metadata)
        self._task = self._kind(data, self._config)
        _require_text_alone(self._task)
        opening = [Message("system", data.system_prompt)] if data.system_prompt else []
        if isinstance(data.prompt, str):
            return Opening((*opening, Message("user", data.prompt)))
        asked = (Message(one.role, content_text(one.content)) for one in data.prompt)
        return Opening((*opening, *asked))

    async def step(self, message: Message, stop_reason: StopReason) -> Reply:
        trace: Any = vf.Trace(
            task=vf.TraceTask(type=self._kind.__name__, data=self._task.data),
            state=state_cls(self._kind)(),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
        )
        said = AssistantMessage(content=message.content)
        trace.nodes.append(vf.MessageNode(message=said, sampled=True))
        await self._task.score(trace)
        rewards = {name: reward.value for name, reward in trace.rewards.items()}
        return Reply(done=True, rewards=rewards, metrics=trace.metrics)

    async def close(self) -> None:
        pass


def _require_text_alone(task: Any) -> None:
    """Raises ValueError for a task that is more than a question and its rewards."""
    kind = type(task)
    overridden = [n for n in ("setup", "finalize") if getattr(kind, n) is not getattr(vf.Task, n)]
    judged = [*task.hooks("reward"), *task.hooks("metric")]
    needs = [f.__name__ for f in judged if "runtime" in inspect.signature(f).parameters]
    if kind.NEEDS_CONTAINER or kind.toolsets(task.config) or overridden or needs:
        raise ValueError(f"{kind.__name__} needs a sandbox or tools; train it over HTTP instead")
