"""What is learned: the loss, and how batches are made."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from .section import Section

RL_LOSSES = ("importance_sampling", "reinforce", "ppo", "grpo", "dapo", "cispo", "gspo", "dro")


class AlgorithmConfig(Section):
    loss: str = "grpo"
    """`importance_sampling`, `reinforce`, `ppo`, `grpo`, `dapo`, `cispo`, `gspo`, `dro`, or a
    function of your own as "package.module:name", which gets loss_options as keyword arguments."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the loss, of terms added to it (kl_coef, kl_estimator, entropy_coef), and
    `correction`: tis, mis, icepop, kpop, decoupled, geo_mask or dppo, with its own options."""
    recompute_logprobs: bool = False
    """Before the first update from a batch, let the trainer compute its log-probs: what updates
    are measured from by a correction, which without them takes the current ones."""
    max_logprob_gap: Annotated[float, Field(gt=0)] | None = None
    """How far trainer and generator may be apart at a step: a bound on rollout/logprob_gap, the
    mean over target tokens of |log pi - log mu| in nats. None: any."""
    on_logprob_gap: Literal["warn", "stop"] = "warn"
    """What happens above max_logprob_gap: a warning in the log, or the end of the run."""
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

    @field_validator("loss")
    @classmethod
    def loss_is_one_for_reinforcement_learning(cls, loss: str) -> str:
        if ":" not in loss and loss not in RL_LOSSES:
            raise ValueError(f"use one of {RL_LOSSES} or 'package.module:name'")
        return loss

    @property
    def episodes_per_batch(self) -> int:
        return self.group_size * self.groups_per_step

    @property
    def updates_per_batch(self) -> int:
        return self.epochs * self.minibatches

    @model_validator(mode="after")
    def stopping_has_a_bound(self) -> Self:
        if self.on_logprob_gap == "stop" and self.max_logprob_gap is None:
            raise ValueError(
                "on_logprob_gap is stop, but there is no max_logprob_gap above which to; give one, "
                "such as 0.1"
            )
        return self

    @model_validator(mode="after")
    def minibatches_are_of_one_size(self) -> Self:
        if self.episodes_per_batch % self.minibatches:
            raise ValueError(
                f"minibatches={self.minibatches} cannot share groups_per_step * group_size = "
                f"{self.episodes_per_batch} episodes evenly"
            )
        return self
