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
    pull: TransferStatus


async def sync_weights(trainer: Trainer, generator: Generator) -> SyncReport:
    """Push, then pull; the trainer drops old versions after a push.

    The order matters: a version is dropped only when `keep_versions` newer ones exist, so the
    one being pulled is never among them.
    """
    start = time.perf_counter()
    ref = await trainer.push_weights()
    pushed = time.perf_counter()
    await generator.pull_weights(ref)
    pulled = time.perf_counter()
    return SyncReport(
        ref,
        push=TransferStatus(ref.num_bytes, pushed - start),
        pull=TransferStatus(ref.num_bytes, pulled - pushed),
    )
