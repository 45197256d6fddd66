"""TrainerHandle: what a controller holds. It keeps the `Trainer` protocol.

A call's path: validate -> pack -> one message per rank, each with its own microbatches -> await
all -> check that ranks agree -> merge. The caller sees neither packing nor ranks. Nothing here
knows Monarch: ranks are reached through `RankCalls`, over actors or in this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge_trainer.pieces import WeightsRef
from forge_trainer.status import EngineFacts, TrainerFacts, TrainerStatus
from forge_trainer.types import (
    CheckpointFormat,
    CheckpointInfo,
    ForwardBackwardResult,
    ForwardResult,
    LossFn,
    Normalize,
    OptimParams,
    OptimStepResult,
    TrainSequence,
    TrainStepResult,
)

from .batches import BatchDealer
from .checkpoints import Checkpoints
from .facts import merge_statuses, trainer_facts
from .publishing import WeightsPublisher
from .ranks import OpenStore, RankCalls, TrainerSetup, ask_all
from .turns import Turns
from .updates import Updates, require_normalize


class TrainerHandle:
    """Call `setup` first and `close` last. Concurrent callers take turns, see `Turns`."""

    def __init__(self, setup: TrainerSetup, ranks: RankCalls) -> None:
        self._setup = setup
        self._ranks = ranks
        self._publisher = WeightsPublisher(ranks, setup)
        self._updates = Updates(ranks, self._publisher)
        self._turns = Turns(before=self._publisher.raise_failure)
        self._checkpoints = Checkpoints(ranks, setup)

    async def setup(self) -> None:
        """Build the engines of all ranks."""
        await self._turns.take(self._set_up)

    async def _set_up(self) -> None:
        facts: list[EngineFacts] = await self._call_all("setup")
        self._facts = facts[0]
        self._batches = BatchDealer(self._ranks, facts, self._setup.trainer)
        await self._publisher.start()

    async def forward(
        self, sequences: Sequence[TrainSequence], *, with_entropy: bool = False
    ) -> ForwardResult:
        """Log-probs of every token under the current weights; no gradients."""
        packed = await self._batches.pack(sequences)
        return await self._turns.take(self._batches.forward, packed, with_entropy)

    async def forward_backward(
        self,
        sequences: Sequence[TrainSequence],
        *,
        loss: str | LossFn,
        loss_config: Mapping[str, Any] | None = None,
        return_logprobs: bool = False,
    ) -> ForwardBackwardResult:
        """Add the gradient of the loss sum over `sequences` to what is accumulated.

        Raises:
            ConfigError: unknown loss or option. DataError: see `validate_sequences`.
            EngineError: the loss failed on a rank; everything accumulated is dropped.
        """
        call = await self._batches.prepare(
            sequences, loss, loss_config, return_logprobs=return_logprobs
        )
        return await self._turns.take(self._batches.forward_backward, call)

    async def optim_step(
        self, *, normalize: Normalize = "tokens", params: OptimParams | None = None
    ) -> OptimStepResult:
        """One update from what is accumulated; see `Updater.optim_step` for errors."""
        require_normalize(normalize)
        return await self._turns.take(self._updates.optim_step, normalize, params)

    async def train_step(
        self,
        sequences: Sequence[TrainSequence],
        *,
        loss: str | LossFn,
        loss_config: Mapping[str, Any] | None = None,
        normalize: Normalize = "tokens",
        params: OptimParams | None = None,
        return_logprobs: bool = False,
    ) -> TrainStepResult:
        """`forward_backward` followed by `optim_step`, with no other caller in between.

        If the update is refused, the gradient goes with it.
        """
        require_normalize(normalize)
        call = await self._batches.prepare(
            sequences, loss, loss_config, return_logprobs=return_logprobs
        )
        return await self._turns.take(
            self._updates.train_step, self._batches, call, normalize, params
        )

    async def clear_gradients(self) -> None:
        """Drop accumulated gradients and counts."""
        await self._turns.take(self._call_all, "clear_gradients")

    async def save(
        self,
        name: str | None = None,
        *,
        path: str | None = None,
        weights_only: bool = False,
        format: CheckpointFormat = "dcp",
        wait: bool = True,
    ) -> CheckpointInfo:
        """Write a checkpoint to `path`, or as `name` into the checkpoint folder.

        Without either, the name is `step-N`, of which the `keep_checkpoints` saved last stay;
        `weights-N` for weights alone and `hf-N` for a float32 Hugging Face directory. With
        `wait=False` the call returns once the state is copied; `wait_for_save` tells when the
        checkpoint is complete.

        Raises:
            CheckpointError: it exists already, cannot be written, or gradients are accumulated; or
                the last save with `wait=False` has failed and nobody has asked for it.
        """

        async def save() -> CheckpointInfo:
            request = self._checkpoints.request(
                self._updates.step,
                name=name,
                path=path,
                weights_only=weights_only,
                format=format,
                wait=wait,
            )
            return await self._checkpoints.save(request)

        return await self._turns.take(save)

    async def wait_for_save(self) -> CheckpointInfo | None:
        """What became of the last save with `wait=False`; None if there is nothing to tell.

        Raises:
            CheckpointError: it failed. The checkpoints before are as they were.
        """
        return await self._checkpoints.wait()

    async def load(
        self,
        *,
        path: str | None = None,
        name: str | None = None,
        step: int | None = None,
        weights_only: bool = False,
    ) -> CheckpointInfo:
        """Continue from a checkpoint; without arguments, from the one saved last.

        Opens a new weights epoch, so that a version may be published again.

        Raises:
            CheckpointError: there is none, or it is damaged or of another model; the trainer is
                as before.
        """

        async def load() -> CheckpointInfo:
            await self._publisher.wait_for_live_weights()
            info = await self._checkpoints.load(
                path=path, name=name, step=step, weights_only=weights_only
            )
            if not weights_only:
                self._updates.step = info.step
            self._publisher.open_epoch()
            return info

        return await self._turns.take(load)

    async def to(self, device: str) -> None:
        """Move the trainer's state to "cpu", so that others may use the device, or back ("cuda").

        Values do not change. While it is away, calls that need it raise EngineError.
        """

        async def move() -> None:
            await self._publisher.wait_for_live_weights()
            await self._call_all("to", device)

        await self._turns.take(move)

    async def train_mode(self) -> None:
        """Switch dropout on. It is off at the start: with it, importance ratios are noise."""
        await self._turns.take(self._call_all, "train_mode")

    async def eval_mode(self) -> None:
        """Switch dropout off again."""
        await self._turns.take(self._call_all, "eval_mode")

    async def push_weights(
        self, *, policy_version: int | None = None, wait: bool = True
    ) -> WeightsRef:
        """Publish the current weights: every rank writes its pieces, then the manifest is written.

        With `wait=False` the call returns once the weights are staged, and the version exists when
        `wait_for_push` says so. With `weights.stage: in_place` the next update, load or move waits
        for it. Older versions beyond `weights.keep_versions` are dropped once nobody reads them.

        Raises:
            WeightsError: `policy_version` is not the current step, the version is published
                already, the weights are not finite, or there is no room for them; or the last push
                with `wait=False` has failed and nobody has asked for it (this every call raises,
                once, and is not made). The last version stays as it was.
        """

        async def push() -> WeightsRef:
            return await self._publisher.push_weights(self._updates.step, policy_version, wait=wait)

        return await self._turns.take(push)

    async def wait_for_push(self) -> WeightsRef | None:
        """What became of the last push with `wait=False`; None if there is nothing to tell.

        Raises:
            WeightsError: it failed. The versions before are as they were.
        """
        return await self._publisher.wait()

    async def replace_store(self, restart: OpenStore) -> WeightsRef:
        """Publish the current weights through the store that `restart` opens, in a new epoch."""
        return await self._turns.take_anyway(
            lambda: self._publisher.replace_store(self._updates.step, restart)
        )

    async def get_config(self) -> TrainerFacts:
        """Static facts of the trainer and all its ranks."""
        transport = self._publisher.transport
        return await trainer_facts(self._ranks, self._facts, self._setup, transport)

    async def get_status(self) -> TrainerStatus:
        """A snapshot that answers at once, also while a step runs."""
        by_rank = await ask_all(self._ranks, "status")
        return merge_statuses(
            by_rank,
            self._batches.one_per_dp_rank(by_rank),
            publisher=self._publisher,
            num_readers=await self._publisher.num_readers(),
            saving=self._checkpoints.saving,
        )

    async def close(self) -> None:
        """Wait for the call and the save that run, then free the ranks, once.

        Raises:
            CheckpointError: the save failed. WeightsError: the push did, and nobody was told. The
                ranks are free nevertheless.
        """
        await self._turns.close(self._close)

    async def _close(self) -> None:
        try:
            await self._publisher.close()
        finally:
            try:
                if not self._ranks.is_lost:
                    await self._checkpoints.wait()
            finally:
                await self._ranks.close()

    async def _call_all(self, method: str, *args: Any) -> list[Any]:
        return await self._ranks.call(method, [args] * self._ranks.size)
