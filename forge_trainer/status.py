"""What trainers and generators say of themselves: facts that stay, and snapshots."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from forge_trainer.pieces import WeightsVersion

T = TypeVar("T")


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
    num_matmul_parameters: int = 0
    """Of the whole model, without embeddings that are only looked up."""
    num_layers: int = 0
    attention_width: int = 0
    """Heads times their size."""
    peak_flops: float | None = None
    """Operations per second that the device can do at most; None if that is not known."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Static facts of one rank."""

    rank: int
    coordinates: dict[str, int]
    """Index on every mesh axis, e.g. {"dp": 1, "tp": 0, "pp": 0}."""
    device: str
    host: str
    pid: int
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES of its process."""
    cpu_threads: int = 1


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """What `get_config` returns: facts that do not change while the trainer lives."""

    model_path: str
    model_type: str
    vocab_size: int
    max_sequence_tokens: int
    num_parameters: int
    model_config: dict[str, Any]
    """The directory's config.json."""
    dp_size: int
    degrees: dict[str, int]
    """Ranks on every axis: data_shard, data_replicate, tensor, pipeline."""
    weights_transport: str
    """How published weights travel."""
    ranks: list[RankFacts]
    library_versions: dict[str, str]


@dataclass(slots=True)
class Progress:
    """How far a rank has come. Its work thread writes here, and others may read at any time."""

    microbatch: int = 0
    """The last that was begun, counted from 1; 0 where a call has none."""
    num_microbatches: int = 0
    ticked_at: float = field(default_factory=time.monotonic)
    """When something was done last, on this process's monotonic clock."""

    def begin(self) -> None:
        """Another call, or none."""
        self.microbatch = self.num_microbatches = 0
        self.tick()

    def tick(self) -> None:
        """Something is done: a microbatch, a file, an agreement between ranks."""
        self.ticked_at = time.monotonic()

    def over(self, microbatches: Sequence[T]) -> Iterator[T]:
        """The microbatches, one at a time, each a piece of progress."""
        self.num_microbatches = len(microbatches)
        for number, microbatch in enumerate(microbatches, 1):
            self.microbatch = number
            yield microbatch
            self.tick()


@dataclass(frozen=True, slots=True)
class RankStatus:
    """A snapshot of one rank that never waits for the step it describes."""

    step: int
    phase: str
    """`idle`, or the name of the call that is running."""
    seconds_in_phase: float
    seconds_without_progress: float
    """Since anything of the call was done last."""
    microbatch: int
    """The last that was begun, counted from 1; 0 where a call has none."""
    num_microbatches: int
    accumulated_sequences: int
    accumulated_tokens: int
    last_error: str | None


@dataclass(frozen=True, slots=True)
class TransferStatus:
    """The last push or pull of weights."""

    num_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second."""
        return self.num_bytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    """What `get_status` returns: a snapshot that never waits for the step it describes."""

    step: int
    phase: str
    """Of the first rank: `idle`, or the name of the call that is running."""
    seconds_in_phase: float
    accumulated_sequences: int
    """Over all data-parallel ranks, like the tokens."""
    accumulated_tokens: int
    published: WeightsVersion | None
    held: list[WeightsVersion]
    """Versions that can be pulled, oldest first."""
    push: TransferStatus | None
    """The last one that was published."""
    is_pushing: bool
    """True while a version is on its way to the store."""
    num_readers: int
    """Readers that hold a version now."""
    saving: str | None
    """Path of the checkpoint that is written beside other calls."""
    last_error: str | None


@dataclass(frozen=True, slots=True)
class GeneratorStatus:
    version: WeightsVersion
    """The weights in use; e0v0 are those of the model directory until a pull."""
    pull: TransferStatus | None
    phase: str
    num_completions: int
    host: str
    pid: int
    num_running: int = 0
    """Requests that have a slot."""
    num_waiting: int = 0
    """Requests that wait for one."""
    num_steps: int = 0
    """Decoding steps since it began: what shows that it works while nothing ends."""
    replicas: tuple[ReplicaStatus, ...] = ()
    """Of a fleet, whose own numbers are sums; empty for one that stands alone."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A generator of a fleet, as the fleet sees it."""

    name: str
    """Such as generator/1."""
    state: Literal["serving", "behind", "lost"]
    """`behind`: it is not asked for completions until it has the weights that others have. `lost`:
    it was taken out for good."""
    num_open: int
    """Calls that it has not answered."""
    reason: str | None
    """Why it was taken out, or why its last pull failed."""
    status: GeneratorStatus | None
    """What it says of itself; None if it does not answer."""
