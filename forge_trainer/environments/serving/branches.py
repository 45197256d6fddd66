"""Which conversation of an episode a request goes on with, and what was sampled in each.

An agent may have several at one time, go back to an earlier point of one, or rewrite what was said:
what goes on from an answer of the model's goes on from its tokens, and all else is a conversation
of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from forge_trainer.types import Completion, Message

from ..acting import Acting
from ..renderer import Tools
from ..transcripts import Conversation
from .asked import Asked


@dataclass(frozen=True, slots=True)
class Point:
    """An answer of the model's: a conversation may go on from there."""

    messages: tuple[Message, ...]
    """All up to the answer, itself included."""
    tools: Tools
    completion: Completion
    conversation: Conversation
    num_tokens: int
    """Of the conversation, up to the answer, itself included."""

    def is_before(self, asked: Asked) -> bool:
        """Whether the request goes on from here, and holds no later answer of anybody's."""
        num_messages = len(self.messages)
        return (
            asked.messages[:num_messages] == self.messages
            and asked.tools == self.tools
            and all(m.role != "assistant" for m in asked.messages[num_messages:])
        )

    @property
    def is_last(self) -> bool:
        """Whether nothing has come after it yet."""
        return self.conversation.num_tokens == self.num_tokens

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """All that the model has seen and said up to here."""
        return self.conversation.token_ids[: self.num_tokens]


@dataclass(frozen=True, slots=True)
class Shown:
    """What the model is shown for a request."""

    token_ids: NDArray[np.int32]
    after: Point | None
    """The point whose tokens these begin with; None: all was rendered anew."""


class Branches:
    """Those of one episode, kept in `acting`."""

    def __init__(self, acting: Acting) -> None:
        self._acting = acting
        self._points: list[Point] = []
        self._num_calls = 0

    def shown(self, asked: Asked) -> Shown:
        """The tokens up to the point that the request goes on from and what follows, or all anew.

        Raises:
            EpisodeError: the chat template does not take the messages.
        """
        acting, renderer = self._acting, self._acting.rules.renderer
        point = max(
            (point for point in self._points if point.is_before(asked)),
            key=lambda point: len(point.messages),
            default=None,
        )
        if point is not None:
            before, more = point, asked.messages[len(point.messages) :]
            bridge = acting.rendered(
                lambda: renderer.bridge(before.messages, before.completion, more, before.tools)
            )
            if bridge is not None:
                more_ids = np.array(bridge, np.int32)
                return Shown(np.concatenate([point.token_ids, more_ids]), point)
        anew = acting.rendered(lambda: renderer.render(asked.messages, asked.tools))
        return Shown(np.array(anew, np.int32), None)

    def keep(self, asked: Asked, shown: Shown, completion: Completion) -> Message:
        """Keep what was sampled; what the model said by it.

        A point that has been gone on from meanwhile is shown to a new conversation, in which what
        was sampled before is no target: each sampled token is one, once.
        """
        after = shown.after
        if after is not None and after.is_last:
            conversation = after.conversation
            conversation.show(shown.token_ids[after.num_tokens :])
        else:
            conversation = Conversation(shown.token_ids)
            self._acting.conversations.append(conversation)
        conversation.add(completion)
        message = self._with_ids(self._acting.hear(completion, asked.tools))
        messages = (*asked.messages, message)
        self._acting.messages = list(messages)
        self._points.append(
            Point(messages, asked.tools, completion, conversation, conversation.num_tokens)
        )
        return message

    def _with_ids(self, message: Message) -> Message:
        """Each call has an id of its own in the episode, in the form that most templates take."""
        first = self._num_calls
        self._num_calls += len(message.tool_calls)
        calls = (
            replace(call, id=f"call{number:05d}")
            for number, call in enumerate(message.tool_calls, first)
        )
        return replace(message, tool_calls=tuple(calls))
