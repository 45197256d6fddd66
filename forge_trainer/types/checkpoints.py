"""What a checkpoint is to hold, and what one holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from forge_trainer.errors import CheckpointError

CheckpointFormat = Literal["dcp", "hf"]


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a checkpoint is to hold."""

    path: str
    weights_only: bool = False
    """Without optimizer, schedule and random state."""
    format: CheckpointFormat = "dcp"
    """`hf` is a Hugging Face directory, which holds weights only."""
    wait: bool = True
    """False: return once the state is copied, and write the files beside the next calls."""

    def __post_init__(self) -> None:
        """Raises CheckpointError for what cannot be asked for."""
        if self.format not in get_args(CheckpointFormat):
            raise CheckpointError(
                f"format is {self.format!r}; use one of {get_args(CheckpointFormat)}"
            )
        if self.format == "hf" and not self.wait:
            raise CheckpointError("format 'hf' is written at once; wait=False is for 'dcp'")

    @property
    def is_full(self) -> bool:
        """With all that a resumed run needs."""
        return self.format == "dcp" and not self.weights_only


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What was really written or loaded."""

    path: str
    step: int
    format: CheckpointFormat
    complete: bool
    weights_only: bool = False
