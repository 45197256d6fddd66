"""TrainerHandle: what a controller holds. It keeps the `Trainer` protocol.

A call's path: validate -> pack -> one message per rank, each with its own microbatches -> await
all -> check that ranks agree -> merge. The caller sees neither packing nor ranks. Nothing here
knows Monarch: ranks are reached through `RankCalls`, over actors or in this process.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_trainer.config.schema import TrainerConfig, WeightsConfig
from forge_trainer.engine.checkpoint import find_checkpoint, step_name
from forge_trainer.errors import CheckpointError
from forge_trainer.functional.losses import make_loss, required_fields
from forge_trainer.functional.packing import (
    PackedCall,
    PackingPlan,
    pack_sequences,
    unpack_values,
    validate_sequences,
)
from forge_trainer.metrics import Sum, merge_metrics
from forge_trainer.protocols import EngineFacts, EngineForwardBackward
from forge_trainer.types import (
    CheckpointInfo,
    ForwardBackwardResult,
    ForwardResult,
    LossFn,
    Normalize,
    OptimParams,
    OptimStepResult,
    TrainerFacts,
    TrainerStatus,
    TrainSequence,
    TrainStepResult,
    WeightsRef,
)

from .publish import WeightsPublisher
from .ranks import RankCalls, agreed

LIBRARIES = ("torch", "torchtitan", "torchmonarch", "torchstore", "transformers")
GPU_FLEX_BLOCK = 128
"""Flex attention on a GPU wants row lengths in multiples of its block."""


@dataclass(frozen=True, slots=True)
class TrainerSetup:
    """What a handle is told when it is made."""

    trainer: TrainerConfig
    weights: WeightsConfig
    model_dir: Path
    checkpoint_folder: Path


class TrainerHandle:
    """Call `setup` first and `close` last. Calls of concurrent callers run one after the other."""

    def __init__(self, setup: TrainerSetup, ranks: RankCalls) -> None:
        self._setup = setup
        self._ranks = ranks
        self._lock = asyncio.Lock()
        self._step = 0
        self._publisher = WeightsPublisher(ranks, setup.weights)

    async def setup(self) -> None:
        """Build the engines of all ranks."""
        async with self._lock:
            facts: list[EngineFacts] = await self._call_all("setup")
        self._facts = facts[0]
        self._dp_ranks = [fact.dp_rank for fact in facts]
        on_gpu = self._facts.device.startswith("cuda")
        packing = self._setup.trainer.packing
        self._plan = PackingPlan(
            max_row_tokens=packing.max_row_tokens,
            rows_per_microbatch=packing.rows_per_microbatch,
            pack=packing.enabled,
            pad_multiple=GPU_FLEX_BLOCK if on_gpu else 1,
        )

    async def forward(
        self, sequences: Sequence[TrainSequence], *, with_entropy: bool = False
    ) -> ForwardResult:
        """Log-probs of every token under the current weights; no gradients."""
        packed = self._pack(sequences, ())
        async with self._lock:
            outputs = await self._call_batches("forward", packed, with_entropy)
        by_dp_rank = self._one_per_dp_rank(outputs)
        logprobs = [[o.logprobs_BT for o in rank_outputs] for rank_outputs in by_dp_rank]
        entropies = [[o.entropies_BT for o in rank_outputs] for rank_outputs in by_dp_rank]
        return ForwardResult(
            logprobs=unpack_values(packed.placements, logprobs),
            entropies=unpack_values(packed.placements, entropies) if with_entropy else None,
        )

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
        async with self._lock:
            return await self._forward_backward(packed, loss, loss_config, return_logprobs)

    async def optim_step(
        self, *, normalize: Normalize = "tokens", params: OptimParams | None = None
    ) -> OptimStepResult:
        """One update from what is accumulated; see `Updater.optim_step` for errors."""
        async with self._lock:
            return await self._optim_step(normalize, params)

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
        """`forward_backward` followed by `optim_step`, with no other caller in between."""
        packed = self._pack_for_loss(sequences, loss, loss_config)
        async with self._lock:
            fb = await self._forward_backward(packed, loss, loss_config, return_logprobs)
            return TrainStepResult(fb, await self._optim_step(normalize, params))

    async def clear_gradients(self) -> None:
        """Drop accumulated gradients and counts."""
        async with self._lock:
            await self._call_all("clear_gradients")

    async def save(self, name: str | None = None, *, path: str | None = None) -> CheckpointInfo:
        """Write the full training state to `path`, or as `name` into the checkpoint folder.

        Without either, the name is `step-N`.

        Raises:
            CheckpointError: it exists already, cannot be written, or gradients are accumulated.
        """
        async with self._lock:
            target = Path(path or self._setup.checkpoint_folder / (name or step_name(self._step)))
            status = await self._ranks.ask(0, "status")
            if status.accumulated_tokens:
                raise CheckpointError(
                    "gradients are accumulated and would be lost; call optim_step or "
                    "clear_gradients before save"
                )
            infos: list[CheckpointInfo] = await self._call_all("save", str(target))
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
            CheckpointError: there is none, or it is incomplete or of another model.
        """
        async with self._lock:
            source = find_checkpoint(self._setup.checkpoint_folder, path=path, name=name, step=step)
            infos: list[CheckpointInfo] = await self._call_all("load", str(source), weights_only)
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
        async with self._lock:
            return await self._publisher.publish(self._step, policy_version)

    async def get_config(self) -> TrainerFacts:
        """Static facts of the trainer and all its ranks."""
        facts = self._facts
        ranks = [self._ranks.ask(rank, "facts") for rank in range(self._ranks.size)]
        return TrainerFacts(
            model_path=str(self._setup.model_dir),
            model_type=facts.model_type,
            vocab_size=facts.vocab_size,
            max_sequence_tokens=facts.max_sequence_tokens,
            num_parameters=facts.num_parameters,
            dp_size=facts.dp_size,
            ranks=list(await asyncio.gather(*ranks)),
            library_versions={name: importlib.metadata.version(name) for name in LIBRARIES},
        )

    async def get_status(self) -> TrainerStatus:
        """A snapshot that answers at once, also while a step runs."""
        asked = [self._ranks.ask(rank, "status") for rank in range(self._ranks.size)]
        by_rank = await asyncio.gather(*asked)
        per_dp_rank = self._one_per_dp_rank(by_rank)
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
        """Wait for the call that runs, then free the ranks."""
        async with self._lock:
            await self._ranks.close()

    def _pack_for_loss(
        self,
        sequences: Sequence[TrainSequence],
        loss: str | LossFn,
        config: Mapping[str, Any] | None,
    ) -> PackedCall:
        make_loss(loss, config)
        return self._pack(sequences, required_fields(loss, config))

    def _pack(self, sequences: Sequence[TrainSequence], required: Sequence[str]) -> PackedCall:
        validate_sequences(
            sequences,
            vocab_size=self._facts.vocab_size,
            max_sequence_tokens=self._facts.max_sequence_tokens,
            required_fields=required,
        )
        return pack_sequences(sequences, dp_size=self._facts.dp_size, plan=self._plan)

    async def _forward_backward(
        self,
        packed: PackedCall,
        loss: str | LossFn,
        loss_config: Mapping[str, Any] | None,
        return_logprobs: bool,
    ) -> ForwardBackwardResult:
        by_rank = await self._call_batches(
            "forward_backward", packed, loss, loss_config, return_logprobs
        )
        shares: list[EngineForwardBackward] = self._one_per_dp_rank(by_rank)
        metrics = merge_metrics(share.metrics for share in shares)
        metrics["loss/sum"] = Sum(sum(share.loss_sum for share in shares))
        logprobs = None
        if return_logprobs:
            logprobs = unpack_values(packed.placements, [s.logprobs_BT for s in shares])
        return ForwardBackwardResult(
            metrics=metrics,
            num_target_tokens=sum(share.num_target_tokens for share in shares),
            num_sequences=sum(share.num_sequences for share in shares),
            logprobs=logprobs,
        )

    async def _optim_step(
        self, normalize: Normalize, params: OptimParams | None
    ) -> OptimStepResult:
        results: list[OptimStepResult] = await self._call_all("optim_step", normalize, params)
        result = agreed("optim_step", results)
        self._step = result.step
        return result

    async def _call_all(self, method: str, *args: Any) -> list[Any]:
        return await self._ranks.call(method, [args] * self._ranks.size)

    async def _call_batches(self, method: str, packed: PackedCall, *args: Any) -> list[Any]:
        """Every rank gets the microbatches of its data-parallel rank and nothing else."""
        own = [(packed.batches[dp_rank], *args) for dp_rank in self._dp_ranks]
        return await self._ranks.call(method, own)

    def _one_per_dp_rank(self, by_rank: Sequence[Any]) -> list[Any]:
        """Ranks that differ only in other axes saw the same tokens; the first of each counts."""
        first = {dp_rank: i for i, dp_rank in reversed(list(enumerate(self._dp_ranks)))}
        return [by_rank[first[dp_rank]] for dp_rank in range(self._facts.dp_size)]
