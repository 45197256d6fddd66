"""Dealing sequences to ranks: validated and packed on the way in, one answer per rank row out."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge_trainer.config import TrainerConfig
from forge_trainer.errors import DataError, EngineError, ForgeTrainerError, WorkerLostError
from forge_trainer.functional.estimates.flops import training_flops
from forge_trainer.functional.losses.fields import required_fields
from forge_trainer.functional.losses.objective import make_loss
from forge_trainer.functional.packing import (
    PackedCall,
    PackingPlan,
    unpack_values,
)
from forge_trainer.functional.validation import pack_valid
from forge_trainer.metrics import Max, Mean, Metric, Sum, merge_metrics
from forge_trainer.status import EngineFacts
from forge_trainer.types import (
    EngineForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    LossFn,
    MicrobatchOutput,
    TrainSequence,
)

from .ranks import RankCalls

GPU_FLEX_BLOCK = 128
"""Flex attention on a GPU wants row lengths in multiples of its block."""


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A forward_backward call that has passed every check."""

    packed: PackedCall
    loss: str | LossFn
    loss_config: Mapping[str, Any] | None
    return_logprobs: bool


class BatchDealer:
    """Knows which rank gets which microbatches, and whose answers count."""

    def __init__(
        self, ranks: RankCalls, facts: Sequence[EngineFacts], trainer: TrainerConfig
    ) -> None:
        self._ranks = ranks
        self._facts = facts
        on_gpu = facts[0].device.startswith("cuda")
        self._plan = PackingPlan(
            max_row_tokens=trainer.packing.max_row_tokens,
            rows_per_microbatch=trainer.packing.rows_per_microbatch,
            pack=trainer.packing.enabled,
            pad_multiple=math.lcm(GPU_FLEX_BLOCK if on_gpu else 1, trainer.parallel.tensor),
            row_multiple=trainer.parallel.num_pipeline_microbatches,
            # Flex attention is always compiled.
            steady_shapes=on_gpu or "model" in trainer.compile,
        )

    async def pack(
        self, sequences: Sequence[TrainSequence], required: Sequence[str] = ()
    ) -> PackedCall:
        """Microbatches for every data-parallel rank; made on a thread, as millions of tokens take
        a while.

        Raises:
            DataError: see `validate_sequences`.
        """
        facts = self._facts[0]
        return await asyncio.to_thread(
            pack_valid,
            sequences,
            dp_size=facts.dp_size,
            plan=self._plan,
            vocab_size=facts.vocab_size,
            max_sequence_tokens=facts.max_sequence_tokens,
            required_fields=required,
        )

    async def prepare(
        self,
        sequences: Sequence[TrainSequence],
        loss: str | LossFn,
        loss_config: Mapping[str, Any] | None,
        *,
        return_logprobs: bool,
    ) -> PreparedCall:
        """Everything about a forward_backward that can be refused before anything is sent.

        Raises:
            ConfigError: unknown loss or option. DataError: see `validate_sequences`.
        """
        make_loss(loss, loss_config)
        packed = await self.pack(sequences, required_fields(loss, loss_config))
        return PreparedCall(packed, loss, loss_config, return_logprobs)

    async def forward(self, call: PackedCall, with_entropy: bool) -> ForwardResult:
        """Log-probs of all sequences, from all ranks."""
        outputs = self.one_per_dp_rank(await self._call("forward", call, with_entropy))
        return merge_outputs(call, outputs, with_entropy=with_entropy)

    async def forward_backward(self, call: PreparedCall) -> ForwardBackwardResult:
        """Let all ranks add their gradients; after an error, none of them keeps any.

        Raises:
            EngineError: also for metrics of different ranks that do not merge.
        """
        try:
            start = time.perf_counter()
            by_rank: list[EngineForwardBackward] = await self._call(
                "forward_backward", call.packed, call.loss, call.loss_config, call.return_logprobs
            )
            shares = self.one_per_dp_rank(by_rank)
            merged = merge_shares(call.packed, shares, return_logprobs=call.return_logprobs)
            merged.metrics.update(self._costs(call.packed, by_rank, time.perf_counter() - start))
            return merged
        except (WorkerLostError, DataError):
            # Lost, or not sent to any rank.
            raise
        except Exception as error:
            await self._ranks.call("clear_gradients", [()] * self._ranks.size)
            if isinstance(error, ForgeTrainerError):
                raise
            raise EngineError(
                f"{type(error).__name__}: {error}", phase="forward_backward"
            ) from error

    async def _call(self, method: str, call: PackedCall, *args: Any) -> list[Any]:
        """Give every rank the rows of its data-parallel rank; what they answer, by rank."""
        own = [(call.ranks[fact.dp_rank], *args) for fact in self._facts]
        return await self._ranks.call(method, own)

    def _costs(
        self, call: PackedCall, by_rank: Sequence[EngineForwardBackward], seconds: float
    ) -> dict[str, Metric]:
        """Time, memory and throughput of a forward_backward, as seen from here."""
        facts, size = self._facts[0], self._ranks.size
        lengths = [placement.length for placement in call.placements]
        peak_gb = max(share.peak_memory_bytes for share in by_rank) / 1e9
        costs: dict[str, Metric] = {
            "time/forward_backward_s": Sum(seconds),
            "memory/peak_gb": Max(peak_gb),
            "trainer/tokens_per_s_per_rank": Mean(sum(lengths) / size, seconds),
        }
        if facts.peak_flops is not None:
            flops = training_flops(
                lengths,
                num_matmul_parameters=facts.num_matmul_parameters,
                num_layers=facts.num_layers,
                attention_width=facts.attention_width,
            )
            costs["trainer/mfu"] = Mean(flops / size / facts.peak_flops, seconds)
        return costs

    def one_per_dp_rank(self, by_rank: Sequence[Any]) -> list[Any]:
        """Of the ranks that saw the same tokens, the first one where the model ends counts."""
        ends = [(i, fact) for i, fact in enumerate(self._facts) if fact.has_outputs]
        first = {fact.dp_rank: i for i, fact in reversed(ends)}
        return [by_rank[first[dp_rank]] for dp_rank in range(self._facts[0].dp_size)]


def merge_outputs(
    call: PackedCall, outputs: Sequence[Sequence[MicrobatchOutput]], *, with_entropy: bool
) -> ForwardResult:
    """One array of values per sequence, in the order in which the sequences were given."""
    logprobs = [[o.logprobs_BT for o in own] for own in outputs]
    entropies = [[o.entropies_BT for o in own if o.entropies_BT is not None] for own in outputs]
    return ForwardResult(
        logprobs=unpack_values(call.placements, logprobs),
        entropies=unpack_values(call.placements, entropies) if with_entropy else None,
    )


def merge_shares(
    call: PackedCall, shares: Sequence[EngineForwardBackward], *, return_logprobs: bool
) -> ForwardBackwardResult:
    """What all data-parallel ranks together have done."""
    metrics = merge_metrics(share.metrics for share in shares)
    metrics["loss/sum"] = Sum(sum(share.loss_sum for share in shares))
    logprobs = None
    if return_logprobs:
        logprobs = unpack_values(call.placements, [share.logprobs_BT for share in shares])
    return ForwardBackwardResult(
        metrics=metrics,
        num_target_tokens=sum(share.num_target_tokens for share in shares),
        num_sequences=sum(share.num_sequences for share in shares),
        logprobs=logprobs,
    )
