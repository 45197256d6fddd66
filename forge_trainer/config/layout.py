"""How a trainer's ranks are laid out."""

from __future__ import annotations

from typing import Self

from pydantic import PositiveInt, model_validator

from .section import Section


class ParallelConfig(Section):
    """How the ranks are laid out; those left over by the axes below are data-parallel."""

    data_replicate: PositiveInt = 1
    """Replicas of the sharded model (HSDP)."""
    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    """Stages of the model; 1F1B."""
    context: PositiveInt = 1
    """Parts of every row (CP); only 1 works so far."""
    expert: PositiveInt = 1
    """Parts of the experts (EP); only 1 works so far."""
    pipeline_microbatches: PositiveInt | None = None
    """Parts that a microbatch's rows are cut into for the pipeline; None is one per stage."""

    @property
    def num_pipeline_microbatches(self) -> int:
        return self.pipeline_microbatches or self.pipeline

    @model_validator(mode="after")
    def microbatches_fill_the_pipeline(self) -> Self:
        if self.num_pipeline_microbatches < self.pipeline:
            raise ValueError(
                f"pipeline_microbatches={self.pipeline_microbatches} leave some of the "
                f"{self.pipeline} pipeline stages without work; give at least {self.pipeline}"
            )
        if self.pipeline == 1 and self.num_pipeline_microbatches > 1:
            raise ValueError(
                f"pipeline_microbatches={self.pipeline_microbatches} without a pipeline would only "
                "pad; leave it out"
            )
        return self

    @model_validator(mode="after")
    def axes_are_supported(self) -> Self:
        if self.context > 1:
            raise ValueError(
                f"context={self.context}: context parallelism is not supported; TorchTitan 0.3.0 "
                "has it on CUDA only, and a row's log-probs would lie on several ranks. Use "
                "tensor and activation_checkpointing for long rows"
            )
        if self.expert > 1:
            raise ValueError(
                f"expert={self.expert}: expert parallelism splits the experts of an MoE model; "
                "the supported models (llama, qwen3) are dense"
            )
        return self


def require_full_layout(num_ranks: int, layout: ParallelConfig) -> None:
    """Raises ValueError if the axes leave a rank without a place."""
    used = layout.data_replicate * layout.tensor * layout.pipeline
    if num_ranks % used:
        raise ValueError(
            f"num_ranks={num_ranks} is not a multiple of data_replicate * tensor * "
            f"pipeline = {used}"
        )
