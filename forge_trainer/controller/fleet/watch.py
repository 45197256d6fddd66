"""Which replicas of a fleet hang: they are asked, now and then, what they have done.

A generator that samples a long completion, or has many requests, is slow; it hangs if it takes no
step at all. One whose process is gone is found without looking: calls to it fail.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forge_trainer.errors import ForgeTrainerError, WorkerLostError
from forge_trainer.status import GeneratorStatus

from .members import Members
from .replica import Replica

logger = logging.getLogger(__name__)

LOOKS = 10
"""In the time that a replica may do nothing: for ten minutes, one a minute."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a busy replica had done, and since when it has done no more."""

    at: float
    done: tuple[int, ...]


class HangWatch:
    """Of one fleet."""

    def __init__(self, members: Members, *, limit_s: float, clock: Clock = time.monotonic) -> None:
        self._members = members
        self._limit_s = limit_s
        self._clock = clock
        self._seen: dict[Replica, _Seen] = {}

    async def run(self) -> None:
        """Looks ten times per limit. Stopped by cancelling it."""
        while True:
            await asyncio.sleep(self._limit_s / LOOKS)
            await self.look()

    async def look(self) -> None:
        """Take out every replica that was busy and has done nothing for the limit."""
        busy = [replica for replica in self._members.living if replica.num_open]
        self._seen = {replica: seen for replica, seen in self._seen.items() if replica in busy}
        statuses = await statuses_of(self._members, busy, timeout_s=self._limit_s / LOOKS)
        for replica in busy:
            if replica.lost is None:
                self._note(replica, statuses[replica])

    def _note(self, replica: Replica, status: GeneratorStatus | None) -> None:
        now, before = self._clock(), self._seen.get(replica)
        done = _done(replica, status, before)
        if before is None or done != before.done or _is_excused(replica, status):
            self._seen[replica] = _Seen(now, done)
        elif now - before.at >= self._limit_s:
            doing = "does not answer" if status is None else f"is in phase {status.phase}"
            self._members.take_out(replica, _hung(replica, now - before.at, doing))


def _done(
    replica: Replica, status: GeneratorStatus | None, before: _Seen | None
) -> tuple[int, ...]:
    """What only grows while it works; what it does not say is as before."""
    if status is not None:
        return replica.num_answered, status.num_steps, status.num_completions
    return replica.num_answered, *(before.done[1:] if before else (0, 0))


def _is_excused(replica: Replica, status: GeneratorStatus | None) -> bool:
    """Who is paused, or only pulls, takes no step: it is enough that it answers."""
    return status is not None and (replica.is_paused or not replica.load)


def _hung(replica: Replica, seconds: float, doing: str) -> WorkerLostError:
    return WorkerLostError(
        f"{replica.name} hangs: it has taken no step and answered nothing for {seconds:.0f} s, and "
        f"{doing}. If one step may take so long, raise generator.request_timeout_s",
        phase="generate",
    )


async def statuses_of(
    members: Members, replicas: Sequence[Replica], *, timeout_s: float
) -> dict[Replica, GeneratorStatus | None]:
    """What each says of itself; None for one that does not answer. Who is gone is taken out."""

    async def ask(replica: Replica) -> GeneratorStatus | None:
        try:
            async with asyncio.timeout(timeout_s):
                return await replica.generator.get_status()
        except WorkerLostError as error:
            members.take_out(replica, error)
        except (TimeoutError, ForgeTrainerError) as error:
            logger.debug("%s says nothing of itself: %r", replica.name, error)
        return None

    statuses = await asyncio.gather(*(ask(replica) for replica in replicas))
    return dict(zip(replicas, statuses, strict=True))
