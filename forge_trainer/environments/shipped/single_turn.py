"""A question and an answer."""

from __future__ import annotations

from forge_trainer.types import Message, Opening, Prompt, Reply, StopReason


class SingleTurn:
    """Asks the prompt, and is done with the answer, which the rewards of the config judge."""

    async def reset(self, task: Prompt, seed: int) -> Opening:
        return Opening(task.messages or (Message("user", task.text),))

    async def step(self, message: Message, stop_reason: StopReason) -> Reply:
        return Reply(done=True)

    async def close(self) -> None:
        pass
