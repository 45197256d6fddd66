"""What one rank does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from forge_trainer.pieces import (
    WeightPiece,
)
from forge_trainer.status import EngineFacts, Progress
from forge_trainer.types import (
    CheckpointInfo,
    EngineForwardBackward,
    LossFn,
    MicrobatchOutput,
    Normalize,
    OptimParams,
    OptimStepResult,
    SaveRequest,
    TrainBatch,
)


class Engine(Protocol):
    """What one rank does. All methods but `wait_for_save` run on one thread, on every rank alike.

    After `setup`, `step` counts completed optimizer updates from 0, and dropout is off: with it,
    the ratio to the generator's log-probs would be noise.
    """

    progress: Progress
    """There from the start; ticks with every microbatch at least."""

    @property
    def step(self) -> int: ...

    @property
    def accumulated(self) -> tuple[int, int]:
        """(sequences, target tokens) of this rank since the last update or clear."""
        ...

    def setup(self) -> None: ...

    def facts(self) -> EngineFacts: ...

    def bound_collectives(self, timeout_s: float) -> None:
        """From here on, a collective of training that takes longer is broken.

        The same on all ranks, between calls; not on the thread of the others.
        """
        ...

    def forward(
        self, batches: Sequence[TrainBatch], *, with_entropy: bool = False
    ) -> list[MicrobatchOutput]: ...

    def forward_backward(
        self, batches: Sequence[TrainBatch], loss_fn: LossFn, *, return_logprobs: bool = False
    ) -> EngineForwardBackward: ...

    def optim_step(
        self, *, normalize: Normalize = "tokens", params: OptimParams | None = None
    ) -> OptimStepResult: ...

    def clear_gradients(self) -> None: ...

    def save(self, request: SaveRequest) -> CheckpointInfo: ...

    def wait_for_save(self) -> CheckpointInfo | None:
        """What became of the last save that did not wait. Called on a thread of its own.

        Raises:
            CheckpointError: it failed.
        """
        ...

    def load(self, path: str, *, weights_only: bool = False) -> CheckpointInfo: ...

    def weight_pieces(self, *, dtype: torch.dtype) -> Iterator[WeightPiece]:
        """This rank's pieces of all tensors under Hugging Face names; a collective.

        Their data may be views of live parameters, valid until the next update, load or move.
        Parameters are published in `dtype`, buffers in their own.
        """
        ...

    def to(self, device: str) -> None:
        """Move parameters, gradients, buffers and optimizer state to "cpu", or back home.

        While they are away, only this method, `clear_gradients` and `close` may be called.
        """
        ...

    def train_mode(self) -> None:
        """Dropout and the like are on from here."""
        ...

    def eval_mode(self) -> None: ...

    def abort(self) -> None:
        """Break the collectives that other ranks wait in for this one, after a failure here.

        Nothing is called after it.
        """
        ...

    def close(self) -> None: ...
