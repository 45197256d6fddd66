"""A whole run. Relations that need the model's own `config.json` are checked elsewhere, by
`forge_trainer.controller.checks`."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, ValidationError, model_validator

from .algorithm import AlgorithmConfig
from .hosts.launch import LaunchConfig
from .layout import ParallelConfig, require_full_layout
from .model import ModelConfig
from .placement import PlacementConfig, Role
from .rollout.asynchrony import AsyncConfig
from .rollout.environment import TASK_REWARD, EnvironmentConfig
from .rollout.evaluation import EvalConfig
from .rollout.generation import GeneratorConfig
from .rollout.task import TaskConfig
from .section import Folder, Section, Seed
from .trainer import ProfilingConfig, TrainerConfig
from .weights import WeightsConfig


class RunConfig(Section):
    folder: Folder
    """Where everything of this run is written."""
    overwrite: bool = False
    """Empty the run folder first if it holds an earlier run."""
    steps: PositiveInt
    """Optimizer updates."""
    seed: Seed = 0
    export: bool = True
    """Write the trained model at the end, as a Hugging Face directory `final` in the run folder."""


class ReportingConfig(Section):
    console: bool = True
    tensorboard: bool = True
    rollouts_per_step: Annotated[int, Field(ge=0)] = 8
    """Episodes of every step that go to rollouts.jsonl."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """What every process writes to its file in `logs`. Errors go to the console, too."""


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
    environment: EnvironmentConfig = EnvironmentConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    async_: AsyncConfig = Field(default=AsyncConfig(), alias="async")
    eval: EvalConfig | None = None
    """None: no evaluation."""
    reporting: ReportingConfig = ReportingConfig()
    launch: LaunchConfig = LaunchConfig()
    placement: PlacementConfig = PlacementConfig()

    @property
    def needs_reference(self) -> bool:
        return bool(self.algorithm.loss_options.get("kl_coef"))

    @property
    def seeded_generator(self) -> GeneratorConfig:
        """The generator's config with a seed."""
        if self.generator.seed is not None:
            return self.generator
        return self.generator.model_copy(update={"seed": self.run.seed})

    @property
    def trainers(self) -> dict[Role, TrainerConfig]:
        """All that are started."""
        found: dict[Role, TrainerConfig] = {"trainer": self.trainer}
        return found | ({"reference": self.reference_trainer} if self.needs_reference else {})

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
    def reference_is_a_trainer_of_its_kind(self) -> Self:
        if self.needs_reference:
            try:
                TrainerConfig.model_validate(self.reference_trainer.model_dump())
            except ValidationError as error:
                reason = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"reference: {reason}") from None
        return self

    @model_validator(mode="after")
    def settings_are_reached(self) -> Self:
        steps, trainer = self.run.steps, self.trainer
        schedule, algorithm = trainer.lr_schedule, self.algorithm
        last = schedule.total_steps
        if (
            last is not None
            and last < steps
            and schedule.decay_steps
            and not (schedule.min_lr_factor)
        ):
            raise ValueError(
                f"trainer.lr_schedule.total_steps: {last}, but run.steps is {steps}; the last "
                f"{steps - last} updates would have a learning rate of 0; give at least {steps}, "
                "or a min_lr_factor above 0"
            )
        if schedule.warmup_steps > steps:
            raise ValueError(
                f"trainer.lr_schedule.warmup_steps: {schedule.warmup_steps}, but run.steps is "
                f"{steps}, so the rate would never reach optimizer.lr; give at most {steps}"
            )
        late = [
            s for s in trainer.profiling.trace_steps + trainer.profiling.memory_steps if s > steps
        ]
        if late:
            raise ValueError(f"trainer.profiling: step {late[0]} is beyond run.steps={steps}")
        if trainer.async_checkpoints and trainer.checkpoint_interval > steps:
            raise ValueError(
                f"trainer.checkpoint_interval: {trainer.checkpoint_interval} is beyond "
                f"run.steps={steps}, so no checkpoint would be written beside training"
            )
        if "loss" in trainer.compile and ":" in algorithm.loss:
            raise ValueError(
                "trainer.compile: 'loss' compiles registered losses, and algorithm.loss is "
                f"{algorithm.loss!r}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def checkpoints_are_made(self) -> Self:
        trainer = self.trainer
        asked = trainer.async_checkpoints or trainer.keep_checkpoints is not None
        if asked and not trainer.checkpoint_interval:
            raise ValueError(
                "trainer.async_checkpoints and trainer.keep_checkpoints need "
                "trainer.checkpoint_interval; without it, the last step alone is saved"
            )
        return self

    @model_validator(mode="after")
    def weights_can_travel(self) -> Self:
        if self.weights.transport == "shared_memory" and self.launch.kind != "local":
            raise ValueError(
                f"weights.transport: shared_memory, but launch.kind: {self.launch.kind} starts "
                "several hosts, which share none; use torchstore"
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
        generator = self.generator
        key = "generator.max_prompt_tokens + generator.max_completion_tokens"
        wanted = generator.max_prompt_tokens + generator.max_completion_tokens
        if (episode := self.environment.max_tokens) is not None and episode > wanted:
            raise ValueError(
                f"environment.max_tokens: {episode}, but {key} = {wanted}, which is the longest "
                "conversation that can be gone on with; raise max_prompt_tokens"
            )
        limits = {
            "trainer.max_sequence_tokens": self.trainer.max_sequence_tokens,
            "trainer.packing.max_row_tokens": self.trainer.packing.max_row_tokens,
            "model.tiny.max_sequence_tokens": (
                self.model.tiny.max_sequence_tokens if self.model.tiny else None
            ),
        }
        for name, limit in limits.items():
            if limit is not None and wanted > limit:
                raise ValueError(f"{key} = {wanted} exceed {name}={limit}")
        return self

    @model_validator(mode="after")
    def evaluation_asks_other_prompts(self) -> Self:
        if self.eval is not None and self.eval.task is None and self.task.path is not None:
            raise ValueError(
                f"eval.task: without it, the prompts of {self.task.path} would be asked, which are "
                "trained on; give a task with a path of its own"
            )
        return self

    @model_validator(mode="after")
    def environment_is_of_use(self) -> Self:
        environment, group_size = self.environment, self.algorithm.group_size
        if environment.min_group > group_size:
            raise ValueError(
                f"environment.min_group: {environment.min_group} exceeds algorithm.group_size="
                f"{group_size}, so every group would be replaced"
            )
        functions = {reward.function for reward in environment.rewards.values()} - {None}
        if self.task.reward is not None and functions and TASK_REWARD not in functions:
            raise ValueError(
                f"task.reward: {self.task.reward!r} would not be asked, since environment.rewards "
                f"names functions of its own; give one of them `function: {TASK_REWARD}`, or leave "
                "task.reward out"
            )
        return self
