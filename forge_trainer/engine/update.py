"""The optimizer step that every engine shares: count, norm, check, scale once, step.

The gradients that arrive here are sums over target tokens. One scalar turns them into the
normalised, clipped gradient: min(1, max_norm / norm') / count with norm' = norm / count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from forge_trainer.config import TrainerConfig
from forge_trainer.errors import DataError, EngineError, NonFiniteError
from forge_trainer.metrics import Last, Metric
from forge_trainer.types import Normalize, OptimParams, OptimStepResult, TrainBatch


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """What the accumulated gradient is a sum over."""

    sequences: int = 0
    tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.sequences + other.sequences, self.tokens + other.tokens)


def count_targets(batch: TrainBatch) -> Counts:
    """Target tokens, and documents with at least one."""
    targets = batch.document_ids_BT[batch.loss_mask_BT]
    return Counts(sequences=len(torch.unique(targets)), tokens=targets.numel())


def allocate_state(optimizer: Optimizer) -> None:
    """Give a new optimizer its state, all zero, with no step counted.

    torch 2.13.0 allocates it in the first `get_optimizer_state_dict`, by a step that Adam counts:
    saving before the first update would change every update after it.
    """
    groups = optimizer.param_groups
    learning_rates = [group["lr"] for group in groups]
    parameters = [p for group in groups for p in group["params"]]
    for group in groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()
    for group, learning_rate in zip(groups, learning_rates, strict=True):
        group["lr"] = learning_rate


class Updater:
    """Owns the optimizers, the schedule, the counts and the step of one rank.

    A frozen model has no optimizers.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler],
        reduce_counts: Callable[[Counts], Counts],
        sum_over_ranks: Callable[[Tensor], Tensor],
        rank: int,
    ) -> None:
        self._config = config
        self._optimizers = optimizers
        for optimizer in optimizers:
            allocate_state(optimizer)
        self._schedulers = schedulers
        self._reduce_counts = reduce_counts
        self._sum_over_ranks = sum_over_ranks
        self._rank = rank
        self.step = 0
        self.skipped_steps = 0
        self.accumulated = Counts()

    def add(self, counts: Counts) -> None:
        """Note what a backward pass added to the gradients."""
        self.accumulated += counts

    def require_trainable(self) -> None:
        """Raises EngineError for a frozen model."""
        if not self._optimizers:
            raise EngineError(
                "this trainer is frozen (trainable: false): it has no gradients and no optimizer; "
                "save and load with weights_only=True"
            )

    def clear(self) -> None:
        """Drop gradients and counts."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.accumulated = Counts()

    def optim_step(self, *, normalize: Normalize, params: OptimParams | None) -> OptimStepResult:
        """Apply the accumulated gradient once.

        Raises:
            DataError: nothing was accumulated that `normalize` could divide by.
            EngineError: the model is frozen.
            NonFiniteError: the gradient is not finite and the policy is "raise". Parameters,
                optimizer state and step are untouched; the gradient is dropped.
        """
        self.require_trainable()
        params = params or OptimParams()
        count = self._divisor(normalize)
        grads = [p.grad for p in self._parameters() if p.grad is not None]
        norm = total_norm(grads, self._sum_over_ranks) / count
        if not math.isfinite(norm):
            return self._refuse_non_finite(norm, self._learning_rates(params))
        max_norm = params.max_grad_norm or self._config.optimizer.max_grad_norm
        clip = min(1.0, max_norm / norm) if norm > 0 else 1.0
        torch._foreach_mul_([_local(grad) for grad in grads], clip / count)
        with self._overridden(params):
            rates = self._learning_rates(params)
            for optimizer in self._optimizers:
                optimizer.step()
        self.step += 1
        last = self._config.lr_schedule.total_steps
        if last is None or self.step <= last:
            for scheduler in self._schedulers:
                scheduler.step()
        self.clear()
        return OptimStepResult(
            step=self.step, grad_norm=norm, learning_rate=rates[""], metrics=self._metrics(rates)
        )

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs beside optimizers and schedules."""
        return {"step": self.step, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.skipped_steps = state["step"], state["skipped_steps"]

    def _divisor(self, normalize: Normalize) -> int:
        total = self._reduce_counts(self.accumulated)
        choices = {"tokens": total.tokens, "sequences": total.sequences, "none": 1}
        if normalize not in choices:
            raise DataError(f"normalize is {normalize!r}; use one of {sorted(choices)}")
        if total.tokens == 0:
            raise DataError(
                "optim_step has no target token to learn from; call forward_backward with a "
                "loss_mask that marks at least one token"
            )
        return choices[normalize]

    def _refuse_non_finite(self, norm: float, rates: dict[str, float]) -> OptimStepResult:
        self.clear()
        if self._config.on_non_finite == "raise":
            raise NonFiniteError(
                f"the gradient norm is {norm}; parameters are untouched, the gradient is dropped",
                rank=self._rank,
                phase="optim_step",
                step=self.step,
            )
        self.skipped_steps += 1
        return OptimStepResult(
            step=self.step,
            grad_norm=norm,
            learning_rate=rates[""],
            skipped=True,
            metrics=self._metrics(rates),
        )

    def _metrics(self, rates: dict[str, float]) -> dict[str, Metric]:
        of_groups: dict[str, Metric] = {
            f"trainer/learning_rate/{pattern}": Last(rate)
            for pattern, rate in rates.items()
            if pattern
        }
        return {"trainer/skipped_steps": Last(float(self.skipped_steps)), **of_groups}

    def _learning_rates(self, params: OptimParams) -> dict[str, float]:
        """By the pattern of a group, and under "" of all other parameters."""
        config = self._config.optimizer
        group = self._optimizers[0].param_groups[0]
        if params.lr is not None:
            return dict.fromkeys(["", *(g.pattern for g in config.param_groups)], params.lr)
        if not config.param_groups:
            return {"": float(group["lr"])}
        # From the config, since a pipeline stage may hold no parameter of a group, and results of
        # all ranks must agree. The schedule has one factor for all groups.
        factor = float(group["lr"]) / group["initial_lr"] if group.get("initial_lr") else 1.0
        own = {g.pattern: config.lr if g.lr is None else g.lr for g in config.param_groups}
        return {pattern: lr * factor for pattern, lr in {"": config.lr, **own}.items()}

    def _parameters(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    @contextlib.contextmanager
    def _overridden(self, params: OptimParams) -> Iterator[None]:
        """The optimizers with `params` in force, as they were afterwards."""
        given = {
            name: value
            for name in ("lr", "betas", "eps", "weight_decay")
            if (value := getattr(params, name)) is not None
        }
        groups: list[dict[str, Any]] = [g for o in self._optimizers for g in o.param_groups]
        before = [{name: group[name] for name in given} for group in groups]
        try:
            for group in groups:
                group.update(given)
            yield
        finally:
            for group, values in zip(groups, before, strict=True):
                group.update(values)


def total_norm(grads: Sequence[Tensor], sum_over_ranks: Callable[[Tensor], Tensor]) -> float:
    """L2 norm of the whole gradient, of which every rank of the world holds some rectangles.

    A rectangle that several ranks hold counts once: each contributes its share.
    """
    if not grads:
        return math.sqrt(float(sum_over_ranks(torch.zeros((), dtype=torch.float64))))
    norms = torch.stack(torch._foreach_norm([_local(grad) for grad in grads])).double()
    shares = torch.tensor([1.0 / _num_copies(grad) for grad in grads], dtype=torch.float64)
    return math.sqrt(float(sum_over_ranks((norms.square() * shares.to(norms.device)).sum())))


def _num_copies(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 1
    mesh, placements = tensor.device_mesh, tensor.placements
    assert not any(placement.is_partial() for placement in placements), placements
    return math.prod(mesh.size(i) for i, p in enumerate(placements) if p.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
