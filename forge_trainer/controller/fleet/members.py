"""Who is in a fleet, and who of them may be asked for completions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from forge_trainer.errors import WeightsError, WorkerLostError
from forge_trainer.pieces import WeightsVersion
from forge_trainer.protocols import Generator

from .replica import Replica

logger = logging.getLogger(__name__)


class Members:
    """The replicas of a fleet, and the weights that they have been promised to run on."""

    def __init__(self, generators: Mapping[str, Generator]) -> None:
        self.all = tuple(Replica(name, generator) for name, generator in generators.items())
        self.version = WeightsVersion(epoch=0, policy_version=0)
        """Nobody who runs on an older one is asked for completions."""
        self._first_lost: WorkerLostError | None = None
        self._changed = asyncio.Event()

    @property
    def living(self) -> list[Replica]:
        return [replica for replica in self.all if replica.lost is None]

    def is_behind(self, replica: Replica) -> bool:
        """True until it has pulled what the fleet promises."""
        return replica.is_torn or replica.version < self.version

    async def wait_for_serving(self, *, but: Replica | None = None) -> list[Replica]:
        """Those that may be asked for completions, but for one; empty if only that one is left.

        Waits for those that are behind if there are no others.

        Raises:
            WorkerLostError: none is left; it names the first cause.
            WeightsError: those that are left cannot pull.
        """
        while True:
            living = self.require_living()
            others = [replica for replica in living if replica is not but]
            serving = [replica for replica in others if not self.is_behind(replica)]
            if serving or not others:
                return serving
            if not any(replica.may_catch_up for replica in others):
                raise self._without_weights(others)
            await self._changed.wait()

    def _without_weights(self, replicas: Sequence[Replica]) -> WeightsError:
        causes = "; ".join(f"{replica.name}: {replica.pull_error}" for replica in replicas)
        return WeightsError(f"no generator has whole weights {self.version} or later: {causes}")

    def require_living(self) -> list[Replica]:
        """Those that are left.

        Raises:
            WorkerLostError: none is; it names the first cause.
        """
        if living := self.living:
            return living
        first = self._first_lost
        assert first is not None, "a fleet has a replica"
        if len(self.all) == 1:
            raise first
        raise WorkerLostError(
            f"all {len(self.all)} generators are lost, the first by: {first.message}",
            rank=first.rank,
            phase=first.phase,
            step=first.step,
            host=first.host,
        )

    def take_out(self, replica: Replica, error: WorkerLostError) -> None:
        """Ask it nothing more; what it has not answered yet fails with `error`."""
        if replica.lost is not None:
            return
        self._first_lost = self._first_lost or error
        num_open = replica.take_out(error)
        logger.warning(
            "%s is taken out, %d of %d generators are left, %d open calls go to them: %s",
            replica.name,
            len(self.living),
            len(self.all),
            num_open,
            error,
        )
        self.note_change()

    def promise(self, version: WeightsVersion) -> None:
        """From now on, nothing is sampled with older weights but what has been asked already."""
        self.version = max(self.version, version)
        self.note_change()

    def note_change(self) -> None:
        """Let those who wait for a replica look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
