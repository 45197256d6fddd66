"""Publishing: all ranks stage and write their pieces, then the manifest is written, then old
versions go. From staging on, it may run beside the next calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from forge_trainer.errors import AlreadyPublishedError, WeightsError
from forge_trainer.functional.pieces.manifests import build_manifest
from forge_trainer.pieces import Layout, RankPieces, StagedWeights, WeightsRef, WeightsVersion
from forge_trainer.protocols import WeightStore
from forge_trainer.status import TransferStatus
from forge_trainer.tasks import limit
from forge_trainer.weights.keys import published_already

from .ranks import OpenStore, RankCalls, TrainerSetup, ask_all
from .retention import Retention

logger = logging.getLogger(__name__)

ABANDON_TIMEOUT_S = 20.0
STATUS_TIMEOUT_S = 5.0


class WeightsPublisher:
    """Gives a trainer's weights to the store, each version once and in order."""

    def __init__(self, ranks: RankCalls, setup: TrainerSetup) -> None:
        self._ranks = ranks
        self._config = setup.weights
        self._store = setup.store
        self._write_timeout_s = setup.trainer.checkpoint_timeout_s
        self._store_timeout_s = setup.trainer.collective_timeout_s
        self._epoch = 0
        self._writing: asyncio.Task[list[RankPieces]] | None = None
        self._publishing: asyncio.Task[WeightsRef] | None = None
        self._retention = self._new_retention(setup.store)
        self.published: WeightsVersion | None = None
        """The newest version that exists."""
        self.push: TransferStatus | None = None

    @property
    def held(self) -> list[WeightsVersion]:
        """Versions that exist, oldest first."""
        return self._retention.held

    @property
    def transport(self) -> str:
        """How the weights travel."""
        return self._store.transport

    async def start(self) -> None:
        """Open an epoch after all that the store holds from earlier trainers."""
        async with self._limit("say what it holds"):
            await self._retention.start()
        epochs = [version.epoch + 1 for version in self.held]
        self._epoch = max([self._epoch, *epochs])

    def _new_retention(self, store: WeightStore) -> Retention:
        return Retention(store, self._config, self._store_timeout_s)

    async def replace_store(self, step: int, restart: OpenStore) -> WeightsRef:
        """Publish the weights of `step` through the store that `restart` opens, in a new epoch.

        If `restart` fails, all stays as it was.
        """
        try:
            await self.wait()
        except Exception as error:
            # What was on its way to the old store does not matter any more.
            logger.warning("the store is replaced after a push that failed: %s", error)
        store = await restart()
        await self._retention.close()
        self._store, self._retention = store, self._new_retention(store)
        self.published = self.push = None
        self.open_epoch()
        await self.start()
        return await self.push_weights(step, None, wait=True)

    def open_epoch(self) -> None:
        """From now on versions are newer than all before, so a step may be published again."""
        self._epoch += 1

    async def push_weights(
        self, step: int, policy_version: int | None, *, wait: bool
    ) -> WeightsRef:
        """Publish the weights of `step`, the current one; see `TrainerHandle.push_weights`."""
        await self.wait()
        version = WeightsVersion(self._epoch, step)
        await self._require_publishable(version, policy_version)
        await self._retention.settle()
        start = time.perf_counter()
        try:
            staged: list[StagedWeights] = await self._ranks.call(
                "stage_weights", [(version, wait)] * self._ranks.size
            )
            _require_step(version, staged)
        except BaseException:
            await self._abandon(version)
            raise
        layouts = [Layout.decode(one.layout) for one in staged]
        ref = WeightsRef(
            version=version,
            num_tensors=len({record.name for one in layouts for record in one.records}),
            num_bytes=sum(one.num_bytes for one in layouts),
            dtype=self._config.dtype,
            transport=self.transport,
        )
        self._writing = asyncio.create_task(self._written(staged), name=f"write {version}")
        self._publishing = asyncio.create_task(
            self._publish(ref, self._writing, self._store, start), name=f"publish {version}"
        )
        if wait:
            await self.wait()
        return ref

    async def _require_publishable(
        self, version: WeightsVersion, policy_version: int | None
    ) -> None:
        if policy_version not in (None, version.policy_version):
            raise WeightsError(
                f"policy_version {policy_version} is not the current step "
                f"{version.policy_version}; leave it out or push right after the step"
            )
        if self.published is not None and version <= self.published:
            raise WeightsError(f"weights {version} are published already ({self.published})")
        async with self._limit("list its versions"):
            if version in await self._store.versions():
                raise published_already(version)

    def _limit(self, what: str) -> contextlib.AbstractAsyncContextManager[None]:
        return limit(self._store_timeout_s, WeightsError, f"the weight store did not {what}")

    async def _written(self, staged: Sequence[StagedWeights]) -> list[RankPieces]:
        written = [one.written for one in staged if one.written is not None]
        if len(written) == len(staged):
            return written
        async with limit(self._write_timeout_s, WeightsError, "a rank did not write its weights"):
            return await ask_all(self._ranks, "written_weights")

    async def _publish(
        self,
        ref: WeightsRef,
        writing: asyncio.Task[list[RankPieces]],
        store: WeightStore,
        start: float,
    ) -> WeightsRef:
        version = ref.version
        try:
            manifest = build_manifest(version, store.transport, await writing)
            try:
                async with self._limit("publish a version"):
                    await store.commit(manifest)
            except AlreadyPublishedError:
                raise
            except BaseException:
                # It may be there nevertheless, and its pieces will go.
                with contextlib.suppress(Exception):
                    async with self._limit("drop a version"):
                        await store.drop(version)
                raise
        except BaseException:
            await self._abandon(version)
            raise
        self.published = version
        self.push = TransferStatus(ref.num_bytes, time.perf_counter() - start)
        self._retention.add(version)
        return ref

    async def num_readers(self) -> int:
        """Readers that hold a version now; 0 if the store does not answer."""
        try:
            async with limit(STATUS_TIMEOUT_S, WeightsError, "the readers were not counted"):
                return await self._store.num_readers()
        except Exception as error:
            logger.warning("%s", error)
            return 0

    @property
    def pushing(self) -> bool:
        """True while a version is on its way."""
        return self._publishing is not None and not self._publishing.done()

    async def wait(self) -> WeightsRef | None:
        """What became of the push that ran beside other calls; None if there was none.

        Raises:
            WeightsError: it failed. Told once.
        """
        if self._publishing is None:
            return None
        publishing = self._publishing
        try:
            ref = await asyncio.shield(publishing)
        except Exception:
            # Not for a cancellation: that waiter has not been told.
            self._forget(publishing)
            raise
        self._forget(publishing)
        return ref

    def _forget(self, publishing: asyncio.Task[WeightsRef]) -> None:
        if self._publishing is publishing:
            self._publishing = None

    async def raise_failure(self) -> None:
        """Raises what made a push fail that nobody has waited for."""
        publishing = self._publishing
        if publishing is not None and publishing.done() and publishing.exception() is not None:
            await self.wait()

    async def wait_for_live_weights(self) -> None:
        """Return once no push reads the live weights any more.

        Raises:
            WeightsError: the push failed.
        """
        if self._config.stage == "in_place" and self._writing is not None:
            await asyncio.wait([self._writing])
            if self._writing.cancelled() or self._writing.exception() is not None:
                await self.wait()

    async def close(self) -> None:
        """Wait for what runs.

        Raises:
            WeightsError: the push that nobody has waited for failed.
        """
        try:
            await self.wait()
        finally:
            await self._retention.close()

    async def _abandon(self, version: WeightsVersion) -> None:
        """Remove what a failed push left; its own failure must not hide the first one."""
        if self._ranks.is_lost:
            # The next trainer on this store cleans up.
            return

        async def abandon(rank: int) -> None:
            try:
                async with asyncio.timeout(ABANDON_TIMEOUT_S):
                    await self._ranks.ask(rank, "abandon_weights", version)
            except Exception as error:
                logger.warning("could not remove half-published weights %s: %r", version, error)

        await asyncio.gather(*(abandon(rank) for rank in range(self._ranks.size)))


def _require_step(version: WeightsVersion, staged: Sequence[StagedWeights]) -> None:
    """Raises WeightsError if a rank is not where the handle believes it is."""
    steps = [one.step for one in staged]
    if set(steps) != {version.policy_version}:
        raise WeightsError(f"weights {version}: the ranks are at steps {steps}; not published")
