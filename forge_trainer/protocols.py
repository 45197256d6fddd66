"""The seams of the project. Read this file first.

A controller talks to a `Trainer` and to `Generator`s. A trainer is a group of ranks; each rank
drives one `Engine` and publishes through one `WeightStore`. Anything that keeps a protocol can
take the place of what ships: another engine, another transport, another generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from forge_trainer.metrics import Metric
from forge_trainer.status import GeneratorStatus, TrainerFacts, TrainerStatus
from forge_trainer.types import (
    CheckpointFormat,
    CheckpointInfo,
    Completion,
    ForwardBackwardResult,
    ForwardResult,
    LossFn,
    Normalize,
    OptimParams,
    OptimStepResult,
    SamplingParams,
    SaveRequest,
    TrainBatch,
    TrainSequence,
    TrainStepResult,
    WeightsRef,
    WeightsVersion,
)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine knows of itself once it is set up."""

    model_type: str
    vocab_size: int
    max_sequence_tokens: int
    num_parameters: int
    dp_rank: int
    dp_size: int
    coordinates: dict[str, int]
    """Index on every mesh axis: dp, tp, pp."""
    has_outputs: bool
    """True where the model ends: this rank's log-probs, loss and metrics are those that count."""
    device: str


@dataclass(frozen=True, slots=True)
class MicrobatchOutput:
    """Log-probs (float32, on the CPU) of one microbatch, aligned with its tokens."""

    logprobs_BT: Tensor
    entropies_BT: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EngineForwardBackward:
    """This rank's share of a forward_backward call."""

    loss_sum: float
    num_target_tokens: int
    num_sequences: int
    metrics: dict[str, Metric]
    logprobs_BT: list[Tensor]
    """One per microbatch, float32, on the CPU; empty unless asked for."""


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """One rank's rectangle of one tensor in Hugging Face layout, copied to the CPU."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: Tensor


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
        """This rank's pieces of all tensors under Hugging Face names; copies, never aliases.

        Parameters come in `dtype`, buffers in their own.
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


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """Where a published piece lies, and what it must contain."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    location: str
    checksum: str | None
    """xxh3-128 of the piece's bytes, hexadecimal; None if it is not verified."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str
    global_shape: tuple[int, ...]
    dtype: str
    pieces: tuple[PieceRecord, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole of one weights version. Written last: a version exists when its manifest does."""

    version: WeightsVersion
    tensors: Mapping[str, TensorEntry]

    @property
    def num_bytes(self) -> int:
        pieces = (piece for entry in self.tensors.values() for piece in entry.pieces)
        return sum(piece.num_bytes for piece in pieces)


class WeightStore(Protocol):
    """Holds published weights versions. Keys are never overwritten."""

    async def write_pieces(
        self, version: WeightsVersion, rank: int, pieces: Sequence[WeightPiece]
    ) -> list[PieceRecord]: ...

    async def commit(self, manifest: Manifest) -> None: ...

    async def versions(self) -> list[WeightsVersion]:
        """The committed versions, oldest first."""
        ...

    async def read_manifest(self, version: WeightsVersion) -> Manifest: ...

    async def read_tensor(self, version: WeightsVersion, entry: TensorEntry) -> Tensor:
        """The whole tensor on the CPU, every piece checked."""
        ...

    async def drop(self, version: WeightsVersion) -> None: ...


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

    async def push_weights(self, *, policy_version: int | None = None) -> WeightsRef: ...

    async def get_config(self) -> TrainerFacts: ...

    async def get_status(self) -> TrainerStatus: ...

    async def close(self) -> None: ...


class Generator(Protocol):
    async def generate(
        self, prompts: Sequence[str], sampling: SamplingParams
    ) -> list[list[Completion]]:
        """`sampling.num_completions` completions for every prompt, in the order of the prompts."""
        ...

    async def pull_weights(self, ref: WeightsRef) -> WeightsVersion: ...

    async def get_status(self) -> GeneratorStatus: ...

    async def close(self) -> None: ...
