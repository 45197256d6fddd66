"""How new weights come to all replicas of a fleet, and how those that are late catch up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection

from forge_trainer.errors import ForgeTrainerError, WorkerLostError
from forge_trainer.pieces import WeightsRef, WeightsVersion

from .members import Members
from .replica import Replica

logger = logging.getLogger(__name__)

LAGGARD_S = 5.0
"""What others get at least, once one has pulled. They get as long again as that one took."""
RETRY_S = 1.0
"""A failed pull is tried again after two of these, then four, up to 64."""

Wanted = WeightsRef | WeightsVersion | None
"""What a generator's `pull_weights` takes."""


class Pulls:
    """Of one fleet, one at a time.

    All replicas pull side by side, each beside its own requests. Once one has the weights and the
    others had time for them, the fleet promises that version: who does not have it is not asked for
    completions until it has caught up, which it does in the background.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._one = asyncio.Lock()

    async def pull(self, wanted: Wanted) -> WeightsVersion:
        """Bring a version to the replicas; the newest by default.

        Raises:
            ForgeTrainerError: no replica got it; the first one's error.
        """
        async with self._one:
            pulling = {replica: self._begin(replica, wanted) for replica in self._askable()}
            try:
                await _first_and_those_not_far_behind(pulling.values())
            except asyncio.CancelledError:
                for task in pulling.values():
                    task.cancel()
                raise
            version = _newest(pulling.values())
            self._members.promise(version)
            for replica, task in pulling.items():
                if replica.lost is None and self._members.is_behind(replica):
                    self._let_catch_up(replica, task)
            return version

    def _askable(self) -> list[Replica]:
        """Those that do not pull already; if all do, they begin anew."""
        living = self._members.require_living()
        waiting = [replica for replica in living if not replica.num_pulling]
        askable = waiting or living
        for replica in askable:
            _stop_catching_up(replica)
        return askable

    def _begin(self, replica: Replica, wanted: Wanted) -> asyncio.Task[WeightsVersion]:
        return asyncio.create_task(self._pull(replica, wanted), name=f"{replica.name} pulls")

    async def _pull(self, replica: Replica, wanted: Wanted) -> WeightsVersion:
        replica.num_pulling += 1
        try:
            version = await replica.ask(replica.generator.pull_weights(wanted))
        except WorkerLostError as error:
            self._members.take_out(replica, error)
            raise
        except ForgeTrainerError as error:
            logger.warning("%s cannot pull weights: %s", replica.name, error)
            replica.note_failed_pull(error)
            raise
        finally:
            replica.num_pulling -= 1
            self._members.note_change()
        replica.note_pull(version)
        return version

    def _let_catch_up(self, replica: Replica, begun: asyncio.Task[WeightsVersion]) -> None:
        logger.info("%s has no weights %s yet; others go on", replica.name, self._members.version)
        replica.catching_up = asyncio.create_task(
            self._catch_up(replica, begun), name=f"{replica.name} catches up"
        )

    async def _catch_up(self, replica: Replica, begun: asyncio.Task[WeightsVersion]) -> None:
        """Pulls what the fleet promises until it has it, once the pull that was begun is over.

        Ends also once the replica is lost.
        """
        try:
            await asyncio.gather(begun, return_exceptions=True)
            while replica.lost is None and self._members.is_behind(replica):
                if replica.num_failed_pulls:
                    await asyncio.sleep(RETRY_S * 2 ** min(replica.num_failed_pulls, 6))
                # A failure has been told, and is tried again.
                with contextlib.suppress(ForgeTrainerError):
                    await self._pull(replica, self._members.version)
        finally:
            begun.cancel()
            if replica.catching_up is asyncio.current_task():
                replica.catching_up = None
                self._members.note_change()

    def stop(self) -> None:
        """Nobody catches up any more."""
        for replica in self._members.all:
            _stop_catching_up(replica)


def _stop_catching_up(replica: Replica) -> None:
    if replica.catching_up is not None:
        replica.catching_up.cancel()
        replica.catching_up = None


async def _first_and_those_not_far_behind(
    pulling: Collection[asyncio.Task[WeightsVersion]],
) -> None:
    """Return once one has succeeded and the others had as long again, or all are done."""
    begun = time.monotonic()
    pending: set[asyncio.Task[WeightsVersion]] = set(pulling)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending and any(task.exception() is None for task in done):
            # Whatever the clock says decides who waits, not what is right.
            patience_s = max(LAGGARD_S, time.monotonic() - begun)
            await asyncio.wait(pending, timeout=patience_s)
            return


def _newest(pulling: Collection[asyncio.Task[WeightsVersion]]) -> WeightsVersion:
    done = [task for task in pulling if task.done()]
    if versions := [task.result() for task in done if task.exception() is None]:
        return max(versions)
    error = next(task.exception() for task in done)
    assert error is not None, "it has not succeeded"
    raise error
