"""The steps that all engines take in the same way: microbatches through a model, one after another.

What differs between engines is a `ModelPass`: how one microbatch goes through the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forge_trainer.errors import EngineError
from forge_trainer.status import Progress
from forge_trainer.types import EngineForwardBackward, MicrobatchOutput, TrainBatch

from .loss_call import LossCalls
from .update import Updater

Outputs = tuple[Tensor, Tensor | None]
"""logprobs_BT, entropies_BT"""
Loss = Callable[[Tensor, Tensor | None, TrainBatch], Tensor]
"""(logprobs_BT, entropies_BT, batch) -> the sum to run backward on"""
FirstError = Callable[[str | None], tuple[int, str | None]]
"""Own error -> (rank, its error) of the first rank that has one, the same on all ranks."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a pass computes of each token, beside its log-prob."""

    entropies: bool = False
    targets_only: bool = False
    """Nobody looks at values of tokens outside the loss mask; they may be 0."""


class ModelPass(Protocol):
    """One microbatch through the model, at once or stage by stage."""

    def forward(self, batch: TrainBatch, wanted: Wanted) -> Outputs | None:
        """Without gradients; None on ranks where the model does not end."""
        ...

    def forward_backward(
        self, batch: TrainBatch, loss: Loss, wanted: Wanted, *, is_last: bool
    ) -> None:
        """Adds to the gradients. `loss` is called once or more, on some rows of the batch each.

        After the last microbatch of a call, gradients are summed over ranks.
        """
        ...

    def abandon(self) -> None:
        """Drop gradients that are not summed over ranks yet."""
        ...


@torch.no_grad()
def forward_all(
    model_pass: ModelPass,
    batches: Sequence[TrainBatch],
    progress: Progress,
    *,
    device: torch.device,
    with_entropy: bool,
) -> list[MicrobatchOutput]:
    """Log-probs of every microbatch; none on ranks where the model does not end."""
    outputs = []
    for batch in progress.over(batches):
        values = model_pass.forward(batch.to(device), Wanted(entropies=with_entropy))
        if values is not None:
            logprobs_BT, entropies_BT = values
            entropies = None if entropies_BT is None else entropies_BT.float().cpu()
            outputs.append(MicrobatchOutput(logprobs_BT.float().cpu(), entropies))
    return outputs


def forward_backward_all(
    model_pass: ModelPass,
    updater: Updater,
    calls: LossCalls,
    *,
    progress: Progress,
    device: torch.device,
    first_error: FirstError,
    return_logprobs: bool,
) -> EngineForwardBackward:
    """Add the gradients of every microbatch; all of them or, after an error, none at all."""
    updater.require_trainable()
    wanted = Wanted(calls.need_entropy, calls.looks_at_targets_only and not return_logprobs)
    try:
        for index, batch in enumerate(progress.over(calls.batches)):
            model_pass.forward_backward(
                batch.to(device),
                calls,
                wanted,
                is_last=index == len(calls.batches) - 1,
            )
        result = calls.result(return_logprobs=return_logprobs)
        progress.tick()
        failed_rank, cause = first_error(calls.error)
        if result is None or cause is not None:
            raise EngineError(
                f"the loss failed: {cause}", rank=failed_rank, phase="forward_backward"
            )
    except BaseException:
        # Half a gradient must not reach the next step.
        model_pass.abandon()
        updater.clear()
        raise
    updater.add(calls.counts)
    return result
