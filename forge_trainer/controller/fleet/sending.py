"""Which replica a request goes to, and where it goes when that one cannot answer it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from forge_trainer.errors import EngineError, WeightsError, WorkerLostError
from forge_trainer.protocols import Generator

from .members import Members
from .replica import Replica

T = TypeVar("T")

MAX_ERRORS_IN_A_ROW = 3
"""Failed steps of a replica without a completion between them, after which it is taken out."""
MAX_HOMES = 65_536
"""Groups whose replica is remembered; the ones that were asked for longest ago are forgotten."""

Call = Callable[[Generator], Coroutine[Any, Any, T]]
"""Something to ask a generator."""


class Sender:
    """Of one fleet. Every request has one outcome: a replica's answer, or an error."""

    def __init__(self, members: Members, slots: int) -> None:
        """`slots` are the completions that a replica samples at one time."""
        self._members = members
        self._homes = Homes(slots)

    async def send(self, call: Call[T], *, tokens: int, group: str = "") -> T:
        """What a replica answers; if it is lost or fails, what another one does.

        Args:
            call: the request.
            tokens: how many it may cost, prompt and completion.
            group: of requests that begin alike; none if empty.
        """
        serving = await self._members.wait_for_serving()
        first = self._homes.choose(serving, group=group, tokens=tokens)
        try:
            return await self.ask(first, call, tokens=tokens)
        except (EngineError, WeightsError, WorkerLostError) as error:
            others = await self._members.wait_for_serving(but=first)
            if not others:
                raise
            failure = error
        second = self._homes.choose(others, group=group, tokens=tokens)
        try:
            return await self.ask(second, call, tokens=tokens)
        except (EngineError, WeightsError, WorkerLostError) as error:
            self._members.require_living()
            raise error from failure

    async def ask(self, replica: Replica, call: Call[T], *, tokens: int = 0) -> T:
        """What this replica answers. It is taken out if it is lost, or does nothing but fail."""
        try:
            return await replica.ask(call(replica.generator), tokens=tokens)
        except WorkerLostError as error:
            self._members.take_out(replica, error)
            raise
        except EngineError as error:
            self._give_up_on(replica, error)
            raise
        except WeightsError as error:
            if tokens:
                replica.note_torn(error)
            raise

    def _give_up_on(self, replica: Replica, error: EngineError) -> None:
        """One that only fails has nothing to do, and would be asked for everything."""
        if replica.errors_in_a_row >= MAX_ERRORS_IN_A_ROW and len(self._members.living) > 1:
            lost = WorkerLostError(
                f"{replica.name} failed {replica.errors_in_a_row} times in a row: {error.message}",
                rank=error.rank,
                phase=error.phase,
                host=error.host,
            )
            self._members.take_out(replica, lost)


class Homes:
    """Chooses a replica: the least loaded one, or the one that has computed the group's prefix."""

    def __init__(self, slots: int) -> None:
        """`slots` are the completions that a replica samples at one time."""
        self._lead = max(1, slots // 4)
        self._homes: OrderedDict[str, Replica] = OrderedDict()

    def choose(self, replicas: Sequence[Replica], *, group: str, tokens: int) -> Replica:
        """One of `replicas`, for a request that may cost so many tokens.

        A group stays where it was, until that replica's load leads over the least by more than a
        quarter of its slots, each with such a request.
        """
        least = min(replicas, key=lambda replica: (replica.load, replica.num_sent))
        if not group:
            return least
        chosen = self._homes.get(group, least)
        if chosen not in replicas or chosen.load - least.load > self._lead * tokens:
            chosen = least
        self._homes[group] = chosen
        self._homes.move_to_end(group)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)
        return chosen
