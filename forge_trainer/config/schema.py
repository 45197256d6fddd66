"""What can be configured. Unknown keys are errors; ranges sit on fields, relations in validators.

Relations that need the model's own `config.json` are checked by `forge_trainer.hf`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A part of the config: frozen, and strict about keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunConfig(Section):
    folder: str
    """Where everything of this run is written."""
    overwrite: bool = False
    """Empty the run folder first if it holds an earlier run."""
    steps: PositiveInt
    """Optimizer updates."""
    seed: int = 0


class TinyModelConfig(Section):
    """A model made on the fly with random weights, for runs without a download."""

    architecture: Literal["qwen3", "llama"] = "qwen3"
    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 512
    num_layers: PositiveInt = 4
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 4
    head_dim: Annotated[int, Field(gt=0, multiple_of=2)] = 32
    max_sequence_tokens: PositiveInt = 256
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def kv_heads_divide_heads(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}"
            )
        return self

    @model_validator(mode="after")
    def llama_heads_span_the_hidden_size(self) -> Self:
        if self.architecture == "llama" and self.num_heads * self.head_dim != self.hidden_size:
            raise ValueError(
                f"llama needs num_heads * head_dim = hidden_size, got "
                f"{self.num_heads} * {self.head_dim} and {self.hidden_size}"
            )
        return self


class ModelConfig(Section):
    """Exactly one of `path` and `tiny`."""

    path: str | None = None
    """A Hugging Face directory or hub id."""
    tiny: TinyModelConfig | None = None
    """Make a tiny model and a byte-level tokenizer in the run folder instead."""

    @model_validator(mode="after")
    def path_or_tiny(self) -> Self:
        if (self.path is None) == (self.tiny is None):
            given = "both" if self.path else "neither"
            raise ValueError(f"give exactly one of path and tiny, got {given}")
        return self


class ParallelConfig(Section):
    """How the ranks are laid out; those left over by the axes below are data-parallel."""

    data_replicate: PositiveInt = 1
    """Replicas of the sharded model (HSDP)."""
    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1


class OptimizerConfig(Section):
    """AdamW."""

    lr: Annotated[float, Field(ge=0.0)] = 1e-5
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this L2 norm, over all parameters and ranks."""


class LRScheduleConfig(Section):
    """Linear warm-up, stable, decay. The default is a constant rate."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """The last steps of `total_steps`, in which the rate falls."""
    total_steps: PositiveInt | None = None
    """Needed with decay_steps."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    min_lr_factor: Fraction = 0.0

    @model_validator(mode="after")
    def phases_fit_into_total_steps(self) -> Self:
        if self.decay_steps and self.total_steps is None:
            raise ValueError("decay_steps needs total_steps")
        if self.total_steps is not None:
            phases = self.warmup_steps + self.decay_steps
            if phases > self.total_steps:
                raise ValueError(
                    f"warmup_steps + decay_steps = {phases} exceed total_steps={self.total_steps}"
                )
        return self


class PackingConfig(Section):
    max_row_tokens: PositiveInt = 2048
    """Longest row; sequences are packed into rows whole."""
    rows_per_microbatch: PositiveInt = 8
    """Rows that go through the model at once, on each data-parallel rank."""
    enabled: bool = True
    """False: one sequence per row."""


class TrainerConfig(Section):
    engine: Literal["titan", "local"] = "titan"
    num_ranks: PositiveInt = 1
    """Processes of the trainer mesh."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass. Parameters, gradients and their sums are float32."""
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_schedule: LRScheduleConfig = LRScheduleConfig()
    packing: PackingConfig = PackingConfig()
    max_sequence_tokens: PositiveInt | None = None
    """Longest sequence; None takes what the model allows."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at one time."""
    on_non_finite: Literal["raise", "skip"] = "raise"
    cpu_threads: PositiveInt = 1
    """Threads of each rank's computations on the CPU."""
    collective_timeout_s: PositiveFloat = 60.0
    master_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of torch.distributed's store; None takes a free one."""
    checkpoint_folder: str | None = None
    """Where `save(name)` writes; None is `checkpoints` in the run folder."""
    checkpoint_interval: Annotated[int, Field(ge=0)] = 0
    """Save every so many steps; 0 never."""

    @property
    def dp_size(self) -> int:
        return self.num_ranks // (self.parallel.tensor * self.parallel.pipeline)

    @model_validator(mode="after")
    def ranks_fill_the_layout(self) -> Self:
        layout = self.parallel
        used = layout.data_replicate * layout.tensor * layout.pipeline
        if self.num_ranks % used:
            raise ValueError(
                f"num_ranks={self.num_ranks} is not a multiple of data_replicate * tensor * "
                f"pipeline = {used}"
            )
        return self

    @model_validator(mode="after")
    def engine_can_do_it(self) -> Self:
        if self.engine == "local" and self.num_ranks != 1:
            raise ValueError(f"engine 'local' runs on one rank, got num_ranks={self.num_ranks}")
        if self.engine == "local" and self.compute_dtype != "float32":
            raise ValueError(f"engine 'local' computes in float32, got {self.compute_dtype}")
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


class WeightsConfig(Section):
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters are published in; the generator runs in the same."""
    keep_versions: PositiveInt = 2
    """Published versions that stay; older ones are dropped."""


class GeneratorConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_prompt_tokens: PositiveInt = 128
    max_completion_tokens: PositiveInt = 16
    temperature: PositiveFloat = 1.0
    batch_size: PositiveInt = 256
    """Completions sampled at one time."""
    cpu_threads: PositiveInt = 1
    """Threads of the generator's computations on the CPU."""


class TaskConfig(Section):
    """Where prompts come from and how completions are judged."""

    name: str = "larger_digit"
    """`larger_digit`, or `reasoning_gym/<dataset>` such as `reasoning_gym/chain_sum`."""
    options: dict[str, Any] = {}
    """Passed to the task, e.g. min_terms for reasoning_gym/chain_sum."""
    reward: str | None = None
    """A reward's name or "package.module:function"; None takes the task's own."""


class AlgorithmConfig(Section):
    loss: Literal["reinforce", "grpo", "dapo"] = "grpo"
    loss_options: dict[str, Any] = {}
    group_size: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt; a group of one has no advantage."""
    groups_per_step: PositiveInt = 32
    """Prompts per optimizer update."""
    divide_by_std: bool = True
    """GRPO's division by the group's standard deviation; False is Dr. GRPO."""
    normalize: Literal["tokens", "sequences"] = "tokens"
    """Mean over all target tokens, or over sequences of each sequence's own mean."""
    max_policy_age: Annotated[int, Field(ge=0)] = 0
    """Updates a completion's weights may be behind when trained on; 0 is on-policy."""

    @property
    def episodes_per_step(self) -> int:
        return self.group_size * self.groups_per_step


class ReportingConfig(Section):
    console: bool = True
    tensorboard: bool = True
    rollouts_per_step: Annotated[int, Field(ge=0)] = 8
    """Episodes of every step that go to rollouts.jsonl."""


class GrpoConfig(Section):
    """Everything of a GRPO run."""

    run: RunConfig
    model: ModelConfig
    trainer: TrainerConfig = TrainerConfig()
    generator: GeneratorConfig = GeneratorConfig()
    weights: WeightsConfig = WeightsConfig()
    task: TaskConfig = TaskConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reporting: ReportingConfig = ReportingConfig()

    @model_validator(mode="after")
    def batch_fills_the_ranks(self) -> Self:
        episodes, dp_size = self.algorithm.episodes_per_step, self.trainer.dp_size
        if episodes < dp_size:
            raise ValueError(
                f"algorithm.groups_per_step * algorithm.group_size = {episodes} episodes cannot "
                f"fill trainer.num_ranks: {dp_size} data-parallel ranks; raise groups_per_step"
            )
        return self

    @model_validator(mode="after")
    def completions_fit_into_a_sequence(self) -> Self:
        wanted = self.generator.max_prompt_tokens + self.generator.max_completion_tokens
        limits = {
            "trainer.max_sequence_tokens": self.trainer.max_sequence_tokens,
            "trainer.packing.max_row_tokens": self.trainer.packing.max_row_tokens,
            "model.tiny.max_sequence_tokens": (
                self.model.tiny.max_sequence_tokens if self.model.tiny else None
            ),
        }
        for name, limit in limits.items():
            if limit is not None and wanted > limit:
                raise ValueError(
                    f"generator.max_prompt_tokens + generator.max_completion_tokens = {wanted} "
                    f"exceed {name}={limit}"
                )
        return self
