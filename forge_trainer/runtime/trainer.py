"""TrainerHandle: what a controller holds. It keeps the `Trainer` protocol.

A call's path: validate -> pack -> one message per rank, each with its own microbatches -> await
all -> check that ranks agree -> merge. The caller sees neither packing nor ranks. Nothing here
knows Monarch: ranks are reached through `RankCalls`, over actors or in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

from forge_trainer.config.schema import WeightsConfig
from forge_trainer.config.trainer import TrainerConfig
from forge_trainer.engine.checkpoint import find_checkpoint, prune_checkpoints, step_name
from forge_trainer.errors import CheckpointError, DataError, ForgeTrainerError, WorkerLostError
from forge_trainer.functional.objective import make_loss, required_fields
from forge_trainer.functional.packing import PackedCall
from forge_trainer.protocols import EngineFacts, EngineForwardBackward
from forge_trainer.status import TrainerFacts, TrainerStatus
from forge_trainer.types import (
    CheckpointFormat,
    CheckpointInfo,
    ForwardBackwardResult,
    ForwardResult,
    LossFn,
    Normalize,
    OptimParams,
    OptimStepResult,
    SaveRequest,
    TrainSequence,
    TrainStepResult,
    WeightsRef,
)

from .batches import BatchDealer, merge_outputs, merge_shares
from .facts import trainer_facts
from .publish import WeightsPublisher
from .ranks import RankCalls, agreed
from .tasks import to_the_end

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """What a handle is told when it is made."""

    trainer: TrainerConfig
    weights: WeightsConfig
    model_dir: Path
    checkpoint_folder: Path


class TrainerHandle:
    """Call `setup` first and `close` last. Calls of concurrent callers run one after the other.

    A call that has begun is never cut short: cancelling it lets it finish, then raises.
    """

    def __init__(self, setup: TrainerSetup, ranks: RankCalls) -> None:
        self._setup = setup
        self._ranks = ranks
        self._lock = asyncio.Lock()
        self._step = 0
        self._is_closed = False
        self._publisher = WeightsPublisher(ranks, setup.weights)

    async def setup(self) -> None:
        """Build the engines of all ranks."""
        await self._alone(self._set_up)

    async def _set_up(self) -> None:
        facts: list[EngineFacts] = await self._call_all("setup")
        self._facts = facts[0]
        self._batches = BatchDealer(self._ranks, facts, self._setup.trainer)
        await self._publisher.start()

    async def forward(
        self, sequences: Sequence[TrainSequence], *, with_entropy: bool = False
    ) -> ForwardResult:
        """Log-probs of every token under the current weights; no gradients."""
        packed = self._batches.pack(sequences)
        outputs = await self._alone(self._batches.call, "forward", packed, with_entropy)
        return merge_outputs(packed, outputs, with_entropy=with_entropy)

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
        packed = self._pack_for_loss(sequences, loss, loss_config)
        return await self._alone(self._forward_backward, packed, loss, loss_config, return_logprobs)

    async def optim_step(
        self, *, normalize: Normalize = "tokens", params: OptimParams | None = None
    ) -> OptimStepResult:
        """One update from what is accumulated; see `Updater.optim_step` for errors."""
        _require_normalize(normalize)
        return await self._alone(self._optim_step, normalize, params)

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
        _require_normalize(normalize)
        packed = self._pack_for_loss(sequences, loss, loss_config)

        async def step() -> TrainStepResult:
            fb = await self._forward_backward(packed, loss, loss_config, return_logprobs)
            try:
                return TrainStepResult(fb, await self._optim_step(normalize, params))
            except WorkerLostError:
                raise
            except ForgeTrainerError:
                await self._call_all("clear_gradients")
                raise

        return await self._alone(step)

    async def clear_gradients(self) -> None:
        """Drop accumulated gradients and counts."""
        await self._alone(self._call_all, "clear_gradients")

    async def save(
        self,
        name: str | None = None,
        *,
        path: str | None = None,
        weights_only: bool = False,
        format: CheckpointFormat = "dcp",
    ) -> CheckpointInfo:
        """Write a checkpoint to `path`, or as `name` into the checkpoint folder.

        Without either, the name is `step-N`; of those, the newest `keep_checkpoints` stay. `hf` is
        a float32 Hugging Face directory.

        Raises:
            CheckpointError: it exists already, cannot be written, or gradients are accumulated.
        """
        if name is not None and path is not None:
            raise CheckpointError(f"give name or path, not both; got {name!r} and {path!r}")
        if format not in get_args(CheckpointFormat):
            raise CheckpointError(f"format is {format!r}; use one of {get_args(CheckpointFormat)}")
        return await self._alone(self._save, name, path, weights_only, format)

    async def _save(
        self, name: str | None, path: str | None, weights_only: bool, format: CheckpointFormat
    ) -> CheckpointInfo:
        status = await self.get_status()
        if status.accumulated_tokens and not weights_only and format == "dcp":
            raise CheckpointError(
                "gradients are accumulated and would be lost; call optim_step or "
                "clear_gradients before save"
            )
        folder, keep = self._setup.checkpoint_folder, self._setup.trainer.keep_checkpoints
        target = path or folder / (name or step_name(self._step))
        request = SaveRequest(str(target), weights_only, format)
        infos: list[CheckpointInfo] = await self._call_all("save", request)
        if keep is not None:
            await asyncio.to_thread(prune_checkpoints, folder, keep)
        return agreed("save", infos)

    async def load(
        self,
        *,
        path: str | None = None,
        name: str | None = None,
        step: int | None = None,
        weights_only: bool = False,
    ) -> CheckpointInfo:
        """Continue from a checkpoint; without arguments, from the newest complete one.

        Opens a new weights epoch, so that a version may be published again.

        Raises:
            CheckpointError: there is none, or it is damaged or of another model; the trainer is
                as before.
        """
        source = find_checkpoint(self._setup.checkpoint_folder, path=path, name=name, step=step)
        return await self._alone(self._load, str(source), weights_only)

    async def _load(self, source: str, weights_only: bool) -> CheckpointInfo:
        infos: list[CheckpointInfo] = await self._call_all("load", source, weights_only)
        info = agreed("load", infos)
        if not weights_only:
            self._step = info.step
        self._publisher.open_epoch()
        return info

    async def push_weights(self, *, policy_version: int | None = None) -> WeightsRef:
        """Publish the current weights: every rank writes its pieces, then the manifest is written.

        Older versions beyond `weights.keep_versions` are dropped after that.

        Raises:
            WeightsError: `policy_version` is not the current step, the version is published
                already, or the weights are not finite. The last version stays as it was.
        """
        return await self._alone(self._push_weights, policy_version)

    async def _push_weights(self, policy_version: int | None) -> WeightsRef:
        return await self._publisher.publish(self._step, policy_version)

    async def get_config(self) -> TrainerFacts:
        """Static facts of the trainer and all its ranks."""
        return await trainer_facts(self._ranks, self._facts, self._setup.model_dir)

    async def get_status(self) -> TrainerStatus:
        """A snapshot that answers at once, also while a step runs."""
        asked = [self._ranks.ask(rank, "status") for rank in range(self._ranks.size)]
        by_rank = await asyncio.gather(*asked)
        per_dp_rank = self._batches.one_per_dp_rank(by_rank)
        errors = [status.last_error for status in by_rank if status.last_error]
        return TrainerStatus(
            step=by_rank[0].step,
            phase=by_rank[0].phase,
            seconds_in_phase=by_rank[0].seconds_in_phase,
            accumulated_sequences=sum(s.accumulated_sequences for s in per_dp_rank),
            accumulated_tokens=sum(s.accumulated_tokens for s in per_dp_rank),
            published=self._publisher.published,
            last_error=errors[0] if errors else None,
        )

    async def close(self) -> None:
        """Wait for the call that runs, then free the ranks. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            await self._alone(self._ranks.close)

    async def _alone(
        self, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The result of `work`, with no other call to the ranks in between."""
        async with self._lock:
            return await to_the_end(work(*args, **kwargs))

    def _pack_for_loss(
        self,
        sequences: Sequence[TrainSequence],
        loss: str | LossFn,
        config: Mapping[str, Any] | None,
    ) -> PackedCall:
        make_loss(loss, config)
        return self._batches.pack(sequences, required_fields(loss, config))

    async def _forward_backward(
        self,
        packed: PackedCall,
        loss: str | LossFn,
        loss_config: Mapping[str, Any] | None,
        return_logprobs: bool,
    ) -> ForwardBackwardResult:
        shares: list[EngineForwardBackward] = await self._batches.call(
            "forward_backward", packed, loss, loss_config, return_logprobs
        )
        return merge_shares(packed, shares, return_logprobs=return_logprobs)

    async def _optim_step(
        self, normalize: Normalize, params: OptimParams | None
    ) -> OptimStepResult:
        results: list[OptimStepResult] = await self._call_all("optim_step", normalize, params)
        result = agreed("optim_step", results)
        self._step = result.step
        return result

    async def _call_all(self, method: str, *args: Any) -> list[Any]:
        return await self._ranks.call(method, [args] * self._ranks.size)


def _require_normalize(normalize: str) -> None:
    if normalize not in get_args(Normalize):
        raise DataError(f"normalize is {normalize!r}; use one of {get_args(Normalize)}")
