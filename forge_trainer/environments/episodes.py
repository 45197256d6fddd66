"""One episode from its opening to its end, and the episodes of a group, judged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from forge_trainer.types import Completion, Episode, GenerationRequest, Prompt

Generate = Callable[[GenerationRequest], Awaitable[Completion]]
"""`generate_one` of a generator or of several."""


class EpisodeRunner:
    """Makes the episodes of a run: environments, renderer, limits, rewards, failures.

    Its verbs may run at once, as many as one likes. A caller that is cancelled leaves no request
    and no environment behind.
    """

    async def run_group(
        self, generate: Generate, prompt: Prompt, *, group_id: int, group_size: int
    ) -> list[Episode] | None:
        """`group_size` judged episodes of a prompt; None: too many failed, take another prompt.

        Raises:
            RolloutError: something failed, and the config says that this ends the run.
        """
        raise NotImplementedError

    async def run_episode(
        self, generate: Generate, prompt: Prompt, *, group_id: int, index: int
    ) -> Episode:
        """One episode with what its environment gave; the functions' rewards are still missing.

        The seed of each of its requests is `request_seed(run seed, group_id, index, turn)`.

        Raises:
            RolloutError: as above.
        """
        raise NotImplementedError

    async def judge_group(self, episodes_G: Sequence[Episode]) -> list[Episode] | None:
        """The episodes of one prompt with all their rewards; None as above.

        Raises:
            RolloutError: as above.
        """
        raise NotImplementedError

    def take_counts(self) -> dict[str, float]:
        """What happened since the last call, as metrics: `failures/<name>` and the like."""
        raise NotImplementedError

    async def close(self) -> None:
        """End the processes of rewards."""
        raise NotImplementedError
