"""Calling a loss that somebody else wrote: check what it returns, and keep ranks together.

A loss that fails on one rank must not leave the others waiting in a collective, so the failing
rank goes on with a loss of zero, and the error is told to all ranks after the last microbatch.
"""

from __future__ import annotations

import dataclasses
import math
import traceback
from collections.abc import Sequence

import torch
from torch import Tensor

from forge_trainer.engine.checkpoint.random_state import random_state, set_random_state
from forge_trainer.functional.losses.mismatch import mismatch
from forge_trainer.functional.losses.objective import Objective, needs_entropy
from forge_trainer.metrics import Mean, Metric, Metrics, as_floats, merge_metrics
from forge_trainer.types import EngineForwardBackward, LossFn, LossOutput, TrainBatch

from .update import Counts, count_targets


class LossCalls:
    """The losses of one forward_backward call on one rank.

    With `compiles`, registered losses go through torch.compile, once per process, loss and value of
    its options. With `may_skip`, a total that is not finite is left to the optimizer step.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        batches: Sequence[TrainBatch],
        *,
        compiles: bool = False,
        may_skip: bool = False,
    ) -> None:
        self._may_skip = may_skip
        self._is_registered = isinstance(loss_fn, Objective)
        self._loss_fn = loss_fn
        if compiles and self._is_registered:
            self._loss_fn = torch.compile(loss_fn, dynamic=True)
        self.batches = batches
        self.need_entropy = needs_entropy(loss_fn)
        self.looks_at_targets_only = self._is_registered
        self._logprobs: list[Tensor] = []
        self._totals: list[Tensor] = []
        self._metrics: list[Metrics] = []
        self.counts = sum((count_targets(batch) for batch in batches), Counts())
        self.error: str | None = None

    def __call__(
        self, logprobs_BT: Tensor, entropies_BT: Tensor | None, batch: TrainBatch
    ) -> Tensor:
        """The loss sum to run backward on; zero, but connected, once a loss has failed."""
        self._logprobs.append(logprobs_BT.detach())
        if self.error is None:
            try:
                with_entropy = dataclasses.replace(batch, entropies_BT=entropies_BT)
                output = _checked(self._loss_fn(logprobs_BT, with_entropy))
                if not self._totals and not self._is_registered:
                    self._check_users_loss(output, logprobs_BT, with_entropy)
            except Exception as error:
                self.error = "".join(traceback.format_exception(error, limit=-3)).strip()
            else:
                self._totals.append(output.total.detach())
                self._metrics += [output.metrics, mismatch(logprobs_BT, batch)]
                return output.total
        # Kept connected to the graph so that every rank still runs backward.
        return 0.0 * logprobs_BT.sum()

    def _check_users_loss(self, output: LossOutput, logprobs_BT: Tensor, batch: TrainBatch) -> None:
        total = float(output.total.detach())
        if math.isfinite(total):
            _require_sum(self._loss_fn, logprobs_BT, batch)
        elif not (self._may_skip and batch.loss_mask_BT.any()):
            # Of a batch without targets, it would be the 0 / 0 of a mean.
            raise ValueError(f"LossOutput.total is {total}; it must be finite")

    def result(self, *, return_logprobs: bool) -> EngineForwardBackward | None:
        """This rank's share, or None after an error, also one in here; waits for the device."""
        if self.error is None:
            try:
                return self._result(return_logprobs)
            except Exception as error:
                self.error = f"its metrics: {type(error).__name__}: {error}"
        return None

    def _result(self, return_logprobs: bool) -> EngineForwardBackward:
        # A pipeline calls the loss on some rows at a time, the same number of times per batch.
        calls = max(1, len(self._logprobs) // max(1, len(self.batches)))
        starts = range(0, len(self._logprobs) if return_logprobs else 0, calls)
        kept = [torch.cat(self._logprobs[start : start + calls]) for start in starts]
        loss_sum = float(torch.stack(self._totals).sum()) if self._totals else 0.0
        metrics = merge_metrics(as_floats(metrics) for metrics in self._metrics)
        metrics["loss/mean"] = Mean(loss_sum, self.counts.tokens)
        return EngineForwardBackward(
            loss_sum=loss_sum,
            num_target_tokens=self.counts.tokens,
            num_sequences=self.counts.sequences,
            metrics=metrics,
            logprobs_BT=[logprobs_BT.float().cpu() for logprobs_BT in kept],
        )


def _require_sum(loss_fn: LossFn, logprobs_BT: Tensor, batch: TrainBatch) -> None:
    """Raises ValueError for a mean.

    In a sum, a token's gradient is the same when the batch comes twice; in a mean, it is half.
    Gradients are compared, not totals: those may cancel to nothing but rounding.
    """
    random = random_state(logprobs_BT.device)
    try:
        once_BT = _gradient(loss_fn, logprobs_BT, batch)
        again_BT = _gradient(loss_fn, logprobs_BT, batch)
        twice_BT = _gradient(loss_fn, *_two_copies(logprobs_BT, batch))[: len(logprobs_BT)]
    finally:
        set_random_state(random, logprobs_BT.device)
    scale = float(once_BT.norm())
    if scale == 0 or float((again_BT - once_BT).norm()) > 1e-5 * scale:
        # Nothing to see, or it draws random numbers, so that no two gradients can be compared.
        return
    if float((twice_BT - once_BT).norm()) > 1e-2 * scale:
        raise ValueError(
            "LossOutput.total must be a sum over tokens: its gradient changes by a factor of "
            f"{float(twice_BT.norm()) / scale:.3g} when the same batch comes twice. Return the "
            "sum; optim_step(normalize=...) divides"
        )


@torch.enable_grad()
def _gradient(loss_fn: LossFn, logprobs_BT: Tensor, batch: TrainBatch) -> Tensor:
    """Of the total, with respect to the log-probs; zero where it does not depend on them."""
    inputs_BT = logprobs_BT.detach().requires_grad_()
    entropies_BT = None if batch.entropies_BT is None else batch.entropies_BT.detach()
    total = loss_fn(inputs_BT, dataclasses.replace(batch, entropies_BT=entropies_BT)).total
    if not total.requires_grad:
        return torch.zeros_like(inputs_BT)
    (gradient_BT,) = torch.autograd.grad(total, inputs_BT, allow_unused=True)
    return torch.zeros_like(inputs_BT) if gradient_BT is None else gradient_BT


def _two_copies(logprobs_BT: Tensor, batch: TrainBatch) -> tuple[Tensor, TrainBatch]:
    rows = torch.arange(len(logprobs_BT), device=logprobs_BT.device).repeat(2)
    both = batch.select_rows(rows)
    second = torch.arange(len(rows), device=rows.device)[:, None] >= len(logprobs_BT)
    offset = int(batch.document_ids_BT.max()) + 1
    ids_BT = both.document_ids_BT
    both = dataclasses.replace(
        both, document_ids_BT=torch.where(second & (ids_BT >= 0), ids_BT + offset, ids_BT)
    )
    return logprobs_BT[rows], both


def _checked(output: LossOutput) -> LossOutput:
    if not isinstance(output, LossOutput):
        raise TypeError(f"a loss must return LossOutput, got {type(output).__name__}")
    total = output.total
    if not isinstance(total, Tensor) or total.dim() != 0:
        got = f"shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise TypeError(f"LossOutput.total must be a 0-dim tensor, the sum over tokens; got {got}")
    for key, metric in output.metrics.items():
        if not isinstance(key, str) or not isinstance(metric, Metric):
            raise TypeError(
                f"LossOutput.metrics[{key!r}] is {type(metric).__name__}; "
                "use Mean, Sum, Max or Last"
            )
    if not total.requires_grad:
        raise ValueError(
            "LossOutput.total does not depend on the log-probs; nothing would be learned"
        )
    return output
