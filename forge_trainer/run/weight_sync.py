"""From a trainer's update to a generator's next completion."""

from __future__ import annotations

import time
from dataclasses import dataclass

from forge_trainer.pieces import WeightsRef
from forge_trainer.protocols import Generator, Trainer
from forge_trainer.status import TransferStatus


@dataclass(frozen=True, slots=True)
class SyncReport:
    ref: WeightsRef
    push: TransferStatus
    """Until the version existed."""
    pull: TransferStatus
    stall_s: float
    """What the trainer waited for: staging."""
    num_held: int
    """Versions that can be pulled."""
    num_readers: int
    """Readers that hold one after the pull."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A push that has begun."""

    ref: WeightsRef
    begun: float
    stall_s: float


async def begin_sync(trainer: Trainer) -> Staged:
    """Stage the weights; the trainer may go on at once."""
    begun = time.perf_counter()
    ref = await trainer.push_weights(wait=False)
    return Staged(ref, begun, time.perf_counter() - begun)


async def finish_sync(staged: Staged, trainer: Trainer, generator: Generator) -> SyncReport:
    """Wait until the version exists, and pull it."""
    await trainer.wait_for_push()
    pushed = time.perf_counter()
    await generator.pull_weights(staged.ref)
    pulled = time.perf_counter()
    status = await trainer.get_status()
    num_bytes = staged.ref.num_bytes
    return SyncReport(
        staged.ref,
        push=TransferStatus(num_bytes, pushed - staged.begun),
        pull=TransferStatus(num_bytes, pulled - pushed),
        stall_s=staged.stall_s,
        num_held=len(status.held),
        num_readers=status.num_readers,
    )


async def sync_weights(trainer: Trainer, generator: Generator) -> SyncReport:
    """Push, then pull."""
    return await finish_sync(await begin_sync(trainer), trainer, generator)
