"""What a controller sees of a generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from forge_trainer.pieces import (
    WeightChecksums,
    WeightsRef,
    WeightsVersion,
)
from forge_trainer.status import GeneratorStatus
from forge_trainer.types import (
    Completion,
    GenerationRequest,
    SamplingParams,
)


class Generator(Protocol):
    async def generate_one(self, request: GenerationRequest) -> Completion:
        """The completion of one prompt. A caller that is cancelled takes its request back.

        What is asked for at the same time changes nothing of it but rounding.

        Raises:
            DataError: the prompt is empty or too long, or its completion would not fit.
            WeightsError: the last pull failed half way.
            EngineError: sampling failed, or the generator was closed.
        """
        ...

    async def generate(
        self, prompts: Sequence[str], sampling: SamplingParams
    ) -> list[list[Completion]]:
        """`sampling.num_completions` completions for every prompt, in the order of the prompts."""
        ...

    async def pause(self) -> None:
        """Sample nothing until `resume`; returns once no step runs. Requests wait.

        A pull that has to let requests end first (`generator.update: drain`) does so all the same.
        """
        ...

    async def resume(self) -> None: ...

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
