"""One episode as its agent sees it: requests in, answers out, within the episode's limits.

No HTTP here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from forge_trainer.functional.seeds import asked_seed
from forge_trainer.types import EpisodeStatus, GenerationRequest

from ..acting import Acting
from ..failures import EpisodeError, Failures
from .answers import Answered
from .asked import Asked, RefusedError, read_request
from .branches import Branches

REQUEST = "agent_request"
"""What a request that asks for what cannot be had is counted as."""
LIMITS: dict[EpisodeStatus, tuple[str, str]] = {
    "truncated_tokens": (
        "context_length_exceeded",
        "the conversation leaves no room for an answer; environment.max_tokens and "
        "generator.max_prompt_tokens say how long one may be",
    ),
    "truncated_turns": (
        "max_turns_exceeded",
        "the episode has had all the answers that environment.max_turns allows",
    ),
    "truncated_tool_calls": (
        "max_tool_calls_exceeded",
        "the episode has more tool calls than environment.max_tool_calls allows",
    ),
}
"""The error's code and message, by the status that they leave the episode with."""


class Session:
    """Fills `acting` with what its agent lets the model say. Closed by `end`."""

    def __init__(self, acting: Acting, failures: Failures) -> None:
        self._acting = acting
        self._failures = failures
        self._branches = Branches(acting)
        self._asked: Counter[bytes] = Counter()
        self._num_under_way = 0
        self._running: set[asyncio.Task[Answered]] = set()
        self._changed = asyncio.Event()
        self._broken: Exception | None = None
        self._is_over = False
        self._was_cut = False
        self.limit: EpisodeStatus | None = None
        """What the agent was told of last; None, too, once it has gone on from there."""

    @property
    def status(self) -> EpisodeStatus:
        """How the episode ends if its agent ends now."""
        if self.limit is not None:
            return self.limit
        return "truncated_completion" if self._was_cut else "completed"

    def read(self, body: bytes) -> Asked:
        """What the body of a request asks for. Raises `RefusedError`, which is counted."""
        try:
            return read_request(body, self._acting.rules.sampling)
        except RefusedError as refused:
            self._failures.count(EpisodeError(REQUEST, f"was refused: {refused}"))
            raise

    async def answer(self, asked: Asked) -> Answered:
        """What the model says. A caller that is cancelled takes its request back.

        Raises:
            RefusedError: a limit was reached; the episode is over; the chat template does not take
                the messages; the generator failed, which `watch` raises as it is.
        """
        if self._is_over:
            raise unknown_key()
        task = asyncio.create_task(self._answer(asked), name="answer")
        self._running.add(task)
        self._changed.set()
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_over:
                raise unknown_key() from None
            raise
        finally:
            self._running.discard(task)
            self._changed.set()

    async def watch(self, *, name: str, timeout_s: float) -> None:
        """Never returns.

        Raises:
            EpisodeError: the agent, called `name`, asked for nothing for `timeout_s`.
            Exception: what the generator raised.
        """
        while True:
            self._changed.clear()
            if self._broken is not None:
                raise self._broken
            limit = asyncio.timeout(None if self._running else timeout_s)
            try:
                async with limit:
                    await self._changed.wait()
            except TimeoutError:
                what = f"took longer than {timeout_s:g} s without asking for anything"
                raise EpisodeError(name, what) from None

    async def end(self) -> None:
        """Answer nothing any more; what is still asked for is taken back."""
        self._is_over = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, asked: Asked) -> Answered:
        try:
            return await self._say(asked)
        except RefusedError:
            raise
        except EpisodeError as failed:
            self._failures.count(failed)
            raise RefusedError(str(failed), code="invalid_messages", param="messages") from failed
        except Exception as error:
            self._broken = error
            what = "the generator failed"
            raise RefusedError(what, code="generator_failed", status=500) from error

    async def _say(self, asked: Asked) -> Answered:
        acting, told = self._acting, self.limit
        self._require_turn()
        shown = self._branches.shown(asked)
        room = acting.room(len(shown.token_ids))
        if room <= 0:
            raise self._reached("truncated_tokens")
        request = self._request(asked, shown.token_ids, room)
        self._num_under_way += 1
        try:
            completion = await acting.generate(request)
        finally:
            self._num_under_way -= 1
        message = self._branches.keep(asked, shown, completion)
        if told == self.limit == "truncated_tokens":
            # It has gone on in a shorter conversation.
            self.limit = None
        self._was_cut = not completion.stopped and len(completion.token_ids) == room
        if acting.has_too_many_tool_calls:
            raise self._reached("truncated_tool_calls")
        return Answered(request.id, message, completion)

    def _require_turn(self) -> None:
        """More turns or tool calls than allowed end an episode for good."""
        if self.limit == "truncated_tool_calls":
            raise self._reached(self.limit)
        num_turns = self._acting.num_turns + self._num_under_way
        if num_turns >= self._acting.rules.limits.max_turns:
            raise self._reached("truncated_turns")

    def _reached(self, limit: EpisodeStatus) -> RefusedError:
        self.limit = limit
        code, message = LIMITS[limit]
        return RefusedError(message, code=code)

    def _request(self, asked: Asked, token_ids: NDArray[np.int32], room: int) -> GenerationRequest:
        rules, place = self._acting.rules, self._acting.place
        prompt = token_ids.tobytes()
        seed = asked_seed(
            rules.seed,
            group_id=place.group_id,
            index=place.index,
            prompt=prompt,
            repetition=self._asked[prompt],
        )
        self._asked[prompt] += 1
        sampling = replace(
            rules.sampling,
            max_completion_tokens=min(room, asked.max_completion_tokens or room),
            stop=(*rules.sampling.stop, *asked.stop),
        )
        return GenerationRequest(token_ids, sampling, seed, str(place.group_id))


def unknown_key() -> RefusedError:
    """Of a key that belongs to no episode under way."""
    what = "the API key belongs to no episode under way"
    return RefusedError(what, code="invalid_api_key", status=401)
