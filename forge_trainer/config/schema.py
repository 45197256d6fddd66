"""What can be configured. Unknown keys are errors; ranges sit on fields, relations in validators.

Relations that need the model's own `config.json` are checked by `forge_trainer.controller.checks`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from .trainer import (
    ParallelConfig,
    ProfilingConfig,
    Section,
    TrainerConfig,
    require_full_layout,
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


class WeightsConfig(Section):
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters are published in; the generator runs in the same."""
    transport: Literal["auto", "shared_memory", "torchstore"] = "auto"
    """How weights travel; auto takes shared memory where trainer and generator share it."""
    shared_memory_folder: str | None = None
    """Where shared memory is mounted; None takes /dev/shm."""
    stage: Literal["copy", "in_place"] = "copy"
    """Copy weights before a push returns; or read the live ones beside the next passes, so that the
    next update waits for it."""
    keep_versions: PositiveInt = 2
    """Published versions that stay; older ones are dropped once nobody reads them."""
    verify: Literal["full", "sample", "off"] = "full"
    """Checksums that are made when publishing and compared when pulling: of every tensor, of one in
    eight (others at the next version), or none. Names, shapes and dtypes are always compared."""
    lease_timeout_s: PositiveFloat = 30.0
    """A reader in torchstore that gave no sign for so long is dead; in shared memory the system
    knows at once. Versions that wait for their readers are looked at four times in this time."""


class GeneratorConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None
    """What it runs in; None takes weights.dtype, and nothing else can be pulled."""
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
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task, e.g. min_terms for reasoning_gym/chain_sum."""
    reward: str | None = None
    """A reward's name or "package.module:function"; None takes the task's own."""


class AlgorithmConfig(Section):
    loss: Literal[
        "importance_sampling", "reinforce", "ppo", "grpo", "dapo", "cispo", "gspo", "dro"
    ] = "grpo"
    loss_options: dict[str, Any] = Field(default_factory=dict)
    group_size: Annotated[int, Field(ge=2)] = 8
    """Completions per prompt; a group of one has no advantage."""
    groups_per_step: PositiveInt = 32
    """Prompts per rollout batch."""
    epochs: PositiveInt = 1
    """How often a rollout batch is trained on."""
    minibatches: PositiveInt = 1
    """Parts that an epoch's episodes are dealt to at random; each makes one optimizer update."""
    divide_by_std: bool = True
    """GRPO's division by the group's standard deviation; False is Dr. GRPO."""
    normalize: Literal["tokens", "sequences"] = "tokens"
    """Mean over all target tokens, or over sequences of each sequence's own mean."""
    max_policy_age: Annotated[int, Field(ge=0)] = 0
    """Updates a completion's weights may be behind when training on its batch begins; 0 is
    on-policy, but for later epochs and minibatches of the same batch."""

    @property
    def episodes_per_batch(self) -> int:
        return self.group_size * self.groups_per_step

    @property
    def updates_per_batch(self) -> int:
        return self.epochs * self.minibatches

    @model_validator(mode="after")
    def minibatches_are_of_one_size(self) -> Self:
        if self.episodes_per_batch % self.minibatches:
            raise ValueError(
                f"minibatches={self.minibatches} cannot share groups_per_step * group_size = "
                f"{self.episodes_per_batch} episodes evenly"
            )
        return self


class ReportingConfig(Section):
    console: bool = True
    tensorboard: bool = True
    rollouts_per_step: Annotated[int, Field(ge=0)] = 8
    """Episodes of every step that go to rollouts.jsonl."""


class ReferenceConfig(Section):
    """The layout of a frozen model; all else is as the trainer's."""

    num_ranks: PositiveInt = 1
    parallel: ParallelConfig = ParallelConfig()

    @model_validator(mode="after")
    def ranks_fill_the_layout(self) -> Self:
        require_full_layout(self.num_ranks, self.parallel)
        return self


class GrpoConfig(Section):
    """Everything of a GRPO run."""

    run: RunConfig
    model: ModelConfig
    trainer: TrainerConfig = TrainerConfig()
    reference: ReferenceConfig | None = None
    """The frozen model that kl_coef in algorithm.loss_options compares with, in processes of its
    own; None takes the trainer's layout."""
    generator: GeneratorConfig = GeneratorConfig()
    weights: WeightsConfig = WeightsConfig()
    task: TaskConfig = TaskConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    reporting: ReportingConfig = ReportingConfig()

    @property
    def needs_reference(self) -> bool:
        return bool(self.algorithm.loss_options.get("kl_coef"))

    @property
    def trainers(self) -> list[TrainerConfig]:
        """All that are started."""
        return [self.trainer, *([self.reference_trainer] if self.needs_reference else [])]

    @property
    def reference_trainer(self) -> TrainerConfig:
        """The trainer's config, frozen, in the reference's layout and on a free port."""
        layout = self.reference or self.trainer
        changes = {
            "num_ranks": layout.num_ranks,
            "parallel": layout.parallel,
            "trainable": False,
            "master_port": None,
            "profiling": ProfilingConfig(),
        }
        return self.trainer.model_copy(update=changes)

    @model_validator(mode="after")
    def reference_is_of_use(self) -> Self:
        if self.reference is not None and not self.needs_reference:
            raise ValueError("reference is given, but algorithm.loss_options has no kl_coef")
        return self

    @model_validator(mode="after")
    def checkpoints_are_made(self) -> Self:
        trainer = self.trainer
        asked = trainer.async_checkpoints or trainer.keep_checkpoints is not None
        if asked and not trainer.checkpoint_interval:
            raise ValueError(
                "trainer.async_checkpoints and trainer.keep_checkpoints need "
                "trainer.checkpoint_interval; without it, no checkpoint is made"
            )
        return self

    @model_validator(mode="after")
    def trainer_is_trainable(self) -> Self:
        if not self.trainer.trainable:
            raise ValueError("trainer.trainable is false; a run trains its trainer")
        return self

    @model_validator(mode="after")
    def batch_fills_the_ranks(self) -> Self:
        algorithm, dp_size = self.algorithm, self.trainer.dp_size
        episodes = algorithm.episodes_per_batch // algorithm.minibatches
        if episodes < dp_size:
            raise ValueError(
                f"algorithm.groups_per_step * algorithm.group_size / algorithm.minibatches = "
                f"{episodes} episodes cannot fill trainer.num_ranks: {dp_size} data-parallel "
                "ranks; raise groups_per_step"
            )
        return self

    @model_validator(mode="after")
    def steps_are_whole_batches(self) -> Self:
        if self.run.steps % self.algorithm.updates_per_batch:
            raise ValueError(
                f"run.steps={self.run.steps} is not a multiple of algorithm.epochs * "
                f"algorithm.minibatches = {self.algorithm.updates_per_batch} updates per batch"
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
