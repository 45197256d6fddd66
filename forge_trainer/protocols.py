"""The seams of the project. Read this file first.

A controller talks to a `Trainer` and to `Generator`s. A trainer is a group of ranks; each rank
drives one `Engine` and publishes through one `WeightStore`. Anything that keeps a protocol can
take the place of what ships: another engine, another transport, another generator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from forge_trainer.pieces import (
    Manifest,
    RankPieces,
    StagedPieces,
    WeightChecksums,
    WeightPiece,
    WeightsRef,
    WeightsVersion,
)
from forge_trainer.status import EngineFacts, GeneratorStatus, TrainerFacts, TrainerStatus
from forge_trainer.types import (
    CheckpointFormat,
    CheckpointInfo,
    Completion,
    EngineForwardBackward,
    ForwardBackwardResult,
    ForwardResult,
    LossFn,
    MicrobatchOutput,
    Normalize,
    OptimParams,
    OptimStepResult,
    SamplingParams,
    SaveRequest,
    TrainBatch,
    TrainSequence,
    TrainStepResult,
)


class Engine(Protocol):
    """What one rank does. All methods but `wait_for_save` run on one thread, on every rank alike.

    After `setup`, `step` counts completed optimizer updates from 0, and dropout is off: with it,
    the ratio to the generator's log-probs would be noise.
    """

    @property
    def step(self) -> int: ...

    @property
    def accumulated(self) -> tuple[int, int]:
        """(sequences, target tokens) of this rank since the last update or clear."""
        ...

    def setup(self) -> None: ...

    def facts(self) -> EngineFacts: ...

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

    def close(self) -> None: ...


class WeightsReading(Protocol):
    """A version that cannot be dropped while it is read."""

    @property
    def manifest(self) -> Manifest: ...

    async def load_into(self, destinations: Mapping[str, Tensor]) -> None:
        """Fill a whole model in place, once all of the version has arrived and been verified."""
        ...

    async def read_into(self, destinations: Mapping[str, Tensor]) -> None:
        """Fill some tensors in place; a DTensor gets the shard that is its own."""
        ...

    async def read(
        self, name: str, *, offsets: Sequence[int] | None = None, shape: Sequence[int] | None = None
    ) -> Tensor:
        """A tensor on the CPU, or a rectangle of it."""
        ...


class WeightStore(Protocol):
    """Holds published weights versions. Nothing is ever overwritten while it can be read.

    Every rank stages and writes its pieces; then one of them commits the manifest.
    """

    @property
    def transport(self) -> str: ...

    def stage(
        self,
        version: WeightsVersion,
        rank: int,
        pieces: Iterable[WeightPiece],
        *,
        in_place: bool = False,
    ) -> StagedPieces:
        """Copy this rank's pieces; or, in place, remember them and copy in `write`.

        Raises:
            WeightsError: they are not finite, or there is no room for them.
        """
        ...

    async def write(self, staged: StagedPieces) -> RankPieces:
        """Bring staged pieces to where readers find them."""
        ...

    async def abandon(self, staged: StagedPieces) -> None:
        """Remove what was staged or written and will not be committed."""
        ...

    async def commit(self, manifest: Manifest) -> None:
        """Make the version exist, at once and whole; WeightsError if it does already."""
        ...

    async def versions(self) -> list[WeightsVersion]:
        """The committed versions, oldest first."""
        ...

    def reading(
        self, version: WeightsVersion | None = None
    ) -> AbstractAsyncContextManager[WeightsReading]:
        """Hold a version, the newest by default, while it is read.

        Raises:
            WeightsError: it does not exist.
        """
        ...

    async def num_readers(self) -> int:
        """Readers that hold a version now."""
        ...

    async def drop(self, version: WeightsVersion) -> bool:
        """Hide the version at once, and delete it unless it is being read; True once it is gone."""
        ...

    async def clean(self) -> list[WeightsVersion]:
        """Remove what former trainers left; the hidden versions that are still read."""
        ...

    def close(self) -> None: ...


class Trainer(Protocol):
    """What a controller sees of a trainer: no ranks, no packing, no data-parallel size."""

    async def forward(
        self, sequences: Sequence[TrainSequence], *, with_entropy: bool = False
    ) -> ForwardResult: ...

    async def forward_backward(
        self,
        sequences: Sequence[TrainSequence],
        *,
        loss: str | LossFn,
        loss_config: Mapping[str, Any] | None = None,
        return_logprobs: bool = False,
    ) -> ForwardBackwardResult: ...

    async def optim_step(
        self, *, normalize: Normalize = "tokens", params: OptimParams | None = None
    ) -> OptimStepResult: ...

    async def train_step(
        self,
        sequences: Sequence[TrainSequence],
        *,
        loss: str | LossFn,
        loss_config: Mapping[str, Any] | None = None,
        normalize: Normalize = "tokens",
        params: OptimParams | None = None,
        return_logprobs: bool = False,
    ) -> TrainStepResult: ...

    async def clear_gradients(self) -> None: ...

    async def save(
        self,
        name: str | None = None,
        *,
        path: str | None = None,
        weights_only: bool = False,
        format: CheckpointFormat = "dcp",
        wait: bool = True,
    ) -> CheckpointInfo: ...

    async def wait_for_save(self) -> CheckpointInfo | None: ...

    async def load(
        self,
        *,
        path: str | None = None,
        name: str | None = None,
        step: int | None = None,
        weights_only: bool = False,
    ) -> CheckpointInfo: ...

    async def to(self, device: str) -> None: ...

    async def train_mode(self) -> None: ...

    async def eval_mode(self) -> None: ...

    async def push_weights(
        self, *, policy_version: int | None = None, wait: bool = True
    ) -> WeightsRef: ...

    async def wait_for_push(self) -> WeightsRef | None: ...

    async def get_config(self) -> TrainerFacts: ...

    async def get_status(self) -> TrainerStatus: ...

    async def close(self) -> None: ...


class Generator(Protocol):
    async def generate(
        self, prompts: Sequence[str], sampling: SamplingParams
    ) -> list[list[Completion]]:
        """`sampling.num_completions` completions for every prompt, in the order of the prompts."""
        ...

    async def pull_weights(self, ref: WeightsRef | WeightsVersion | None = None) -> WeightsVersion:
        """Load a version, the newest by default."""
        ...

    async def weight_checksums(self) -> WeightChecksums:
        """What it runs on: the version, and a checksum of every tensor."""
        ...

    async def read_weight(self, name: str) -> Tensor:
        """A copy on the CPU of a tensor that it runs on, by any of its names."""
        ...

    async def get_status(self) -> GeneratorStatus: ...

    async def close(self) -> None: ...
