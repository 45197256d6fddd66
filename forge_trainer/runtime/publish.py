"""Publishing: all ranks write their pieces, then one writes the manifest, then old versions go."""

from __future__ import annotations

import logging
import time

from forge_trainer.config.schema import WeightsConfig
from forge_trainer.errors import WeightsError
from forge_trainer.functional.manifests import build_manifest
from forge_trainer.status import TransferStatus
from forge_trainer.types import WeightsRef, WeightsVersion

from .ranks import RankCalls

logger = logging.getLogger(__name__)


class WeightsPublisher:
    """Gives a trainer's weights to the store, each version once and in order."""

    def __init__(self, ranks: RankCalls, config: WeightsConfig) -> None:
        self._ranks = ranks
        self._config = config
        self._epoch = 0
        self.published: WeightsVersion | None = None
        """The newest version that exists."""
        self.held: list[WeightsVersion] = []
        """Versions that exist, oldest first."""
        self.push: TransferStatus | None = None

    async def start(self) -> None:
        """Open an epoch after all that the store holds from earlier trainers."""
        held: list[WeightsVersion] = await self._ranks.ask(0, "held_versions")
        self._epoch = max((version.epoch + 1 for version in held), default=0)

    def open_epoch(self) -> None:
        """From now on versions are newer than all before, so a step may be published again."""
        self._epoch += 1

    async def publish(self, step: int, policy_version: int | None) -> WeightsRef:
        """Publish the weights of `step`, the current one; see `TrainerHandle.push_weights`."""
        version = WeightsVersion(self._epoch, step)
        self._require_publishable(version, policy_version)
        start = time.perf_counter()
        try:
            records = await self._ranks.call("write_weights", [(version,)] * self._ranks.size)
            manifest = build_manifest(version, [r for own in records for r in own])
            await self._ranks.ask(0, "commit_weights", manifest)
        except BaseException:
            await self._drop_quietly(version)
            raise
        self.published = version
        self.push = TransferStatus(manifest.num_bytes, time.perf_counter() - start)
        await self._drop_old_versions()
        return WeightsRef(
            version=version,
            num_tensors=len(manifest.tensors),
            num_bytes=manifest.num_bytes,
            dtype=self._config.dtype,
        )

    def _require_publishable(self, version: WeightsVersion, policy_version: int | None) -> None:
        if policy_version not in (None, version.policy_version):
            raise WeightsError(
                f"policy_version {policy_version} is not the current step "
                f"{version.policy_version}; leave it out or push right after the step"
            )
        if self.published is not None and version <= self.published:
            raise WeightsError(f"weights {version} are published already ({self.published})")

    async def _drop_old_versions(self) -> None:
        held: list[WeightsVersion] = await self._ranks.ask(0, "held_versions")
        self.held = held[-self._config.keep_versions :]
        for version in held[: -self._config.keep_versions]:
            await self._ranks.ask(0, "drop_weights", version)

    async def _drop_quietly(self, version: WeightsVersion) -> None:
        """Remove what a failed push left; its own failure must not hide the first one."""
        try:
            await self._ranks.ask(0, "drop_weights", version)
        except Exception as error:
            logger.warning("could not remove the half-published weights %s: %s", version, error)
