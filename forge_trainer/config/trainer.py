"""What can be configured of a trainer: engine, precision, packing, faults, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from .layout import ParallelConfig, require_full_layout
from .optimizer import LRScheduleConfig, OptimizerConfig
from .section import Folder, Seconds, Section, Seed


class PackingConfig(Section):
    max_row_tokens: PositiveInt = 2048
    """Longest row; sequences are packed into rows whole."""
    rows_per_microbatch: PositiveInt = 8
    """Rows that go through the model at once, on each data-parallel rank."""
    enabled: bool = True
    """False: one sequence per row."""


class ProfilingConfig(Section):
    """Step N is the work that leads to N updates."""

    folder: Folder | None = None
    """Where the files go: step-N-rank-R.trace.json.gz (Perfetto) and .memory.pickle
    (pytorch.org/memory_viz)."""
    trace_steps: list[PositiveInt] = []
    """Steps whose operators and kernels are traced."""
    memory_steps: list[PositiveInt] = []
    """Steps whose allocations on the GPU are recorded."""

    @model_validator(mode="after")
    def steps_have_a_folder(self) -> Self:
        if (self.trace_steps or self.memory_steps) and self.folder is None:
            raise ValueError("profiling.folder is missing: where shall traces go?")
        return self


class TrainerConfig(Section):
    engine: str = "titan"
    """`titan`, `local`, or an engine of your own as "package.module:Engine"."""
    num_ranks: PositiveInt = 1
    """Processes of the trainer mesh."""
    trainable: bool = True
    """False: no gradients and no optimizer; a reference model that can only do `forward`."""
    seed: Seed = 0
    """Of the random numbers that a loss or dropout draws; data-parallel ranks differ."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass. Parameters, gradients and their sums are float32."""
    float8: Literal["none", "rowwise", "rowwise_with_gw_hp", "emulated"] = "none"
    """torchao's recipe for products in linear layers (not the lm_head). Needs the extra `float8`
    and compute capability 8.9; `emulated` rounds in the same way on any device, slowly."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass, to save memory; never changes the gradient."""
    defer_gradient_reduction: bool = False
    """Sum gradients over ranks once per call, not once per microbatch. Each rank then holds whole
    float32 gradients until the call ends."""
    compile: list[Literal["model", "loss"]] = []
    """What goes through torch.compile: every transformer block, registered losses. On the CPU it
    needs a C++ compiler."""
    profiling: ProfilingConfig = ProfilingConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LRScheduleConfig = LRScheduleConfig()
    packing: PackingConfig = PackingConfig()
    max_sequence_tokens: PositiveInt | None = None
    """Longest sequence; None takes what the model allows."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at one time."""
    on_non_finite: Literal["raise", "skip"] = "raise"
    cpu_threads: PositiveInt | None = None
    """Threads of each rank's computations on the CPU; None is a fair share of the host's cores."""
    collective_timeout_s: Seconds = 60.0
    """A rank that dies or hangs in a collective ends the call within this time."""
    init_timeout_s: Seconds = 600.0
    """The same for the first `forward`, `forward_backward` and `optim_step`, which compile, and
    where shapes are compiled for the first of each shape."""
    stall_timeout_s: Seconds = 600.0
    """A call in which no rank makes progress ends after this time; one microbatch on every rank
    must take less. Calls that may take longer for other reasons get what those are given."""
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of torch.distributed's store; None takes a free one."""
    checkpoint_folder: Folder | None = None
    """Where `save(name)` writes; None is `checkpoints` in the run folder."""
    checkpoint_interval: Annotated[int, Field(ge=0)] = 0
    """Save every so many steps; the last step of a run is saved always."""
    async_checkpoints: bool = False
    """Copy the state when a checkpoint is due, and write it beside the next steps."""
    checkpoint_timeout_s: Seconds = 1800.0
    """How long ranks wait for each other's files."""
    keep_checkpoints: PositiveInt | None = None
    """Of the checkpoints named by step, the newest that stay; None keeps all."""

    @property
    def grace_s(self) -> float:
        """The part of `collective_timeout_s`, or of `init_timeout_s`, that a rank gets to explain
        a broken collective: torch's collectives wait that much less.

        Monarch needs about 9 s to notice a dead process.
        """
        return min(15.0, self.collective_timeout_s / 4)

    @property
    def degrees(self) -> dict[str, int]:
        """Ranks on every axis."""
        return {
            "data_shard": self.dp_size // self.parallel.data_replicate,
            "data_replicate": self.parallel.data_replicate,
            "tensor": self.parallel.tensor,
            "pipeline": self.parallel.pipeline,
        }

    @property
    def layout(self) -> str:
        """Which rank holds what, e.g. "dp2x1 tp2 pp1" (shards x replicas)."""
        shards = self.dp_size // self.parallel.data_replicate
        axes = f"dp{shards}x{self.parallel.data_replicate}"
        return f"{axes} tp{self.parallel.tensor} pp{self.parallel.pipeline}"

    @property
    def dp_size(self) -> int:
        return self.num_ranks // (self.parallel.tensor * self.parallel.pipeline)

    @model_validator(mode="after")
    def ranks_fill_the_layout(self) -> Self:
        require_full_layout(self.num_ranks, self.parallel)
        return self

    @model_validator(mode="after")
    def no_time_out_is_shorter_than_a_collective(self) -> Self:
        for name in ("init_timeout_s", "stall_timeout_s"):
            if (value := getattr(self, name)) < self.collective_timeout_s:
                raise ValueError(
                    f"{name}={value:g} must not be less than collective_timeout_s="
                    f"{self.collective_timeout_s:g}"
                )
        return self

    @model_validator(mode="after")
    def local_engine_can_do_it(self) -> Self:
        if self.engine != "local":
            return self
        if self.num_ranks != 1:
            raise ValueError(f"engine 'local' runs on one rank, got num_ranks={self.num_ranks}")
        features = (
            "compute_dtype",
            "float8",
            "activation_checkpointing",
            "defer_gradient_reduction",
            "compile",
        )
        for name in features:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"engine 'local' has no {name}, got {value!r}; use 'titan'")
        if self.optimizer.param_groups or self.optimizer.implementation != "auto":
            raise ValueError(
                "engine 'local' has no optimizer.param_groups and no optimizer.implementation; "
                "use 'titan'"
            )
        return self

    @model_validator(mode="after")
    def reduction_can_be_deferred(self) -> Self:
        if self.defer_gradient_reduction and self.parallel.pipeline > 1:
            raise ValueError(
                "defer_gradient_reduction is for layouts without a pipeline; a pipeline reduces "
                "once per microbatch already"
            )
        return self

    @model_validator(mode="after")
    def sequences_fit_into_rows(self) -> Self:
        longest = self.max_sequence_tokens
        if longest is not None and longest > self.packing.max_row_tokens:
            raise ValueError(
                f"max_sequence_tokens={longest} exceeds packing.max_row_tokens="
                f"{self.packing.max_row_tokens}"
            )
        return self
