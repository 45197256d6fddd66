"""Work that the ranks of a trainer do together, in a group of its own: one error is everyone's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from forge_trainer.errors import CheckpointError

T = TypeVar("T")


class RankGroup:
    """The ranks that save and load together; one alone where there is no torch.distributed.

    Its collectives never meet those of training, so they may run on a thread of their own.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.rank = 0 if process_group is None else dist.get_rank(process_group)
        self.size = 1 if process_group is None else dist.get_world_size(process_group)

    @classmethod
    def of_all_ranks(cls, timeout_s: float) -> RankGroup:
        """A new group of the whole world, over gloo; a collective."""
        return cls(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))

    def on_first(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, on every rank; the others wait for it.

        Raises:
            CheckpointError: what it raises there. On all ranks alike.
        """
        own = _outcome(work) if self.rank == 0 else (None, None)
        result, _ = self._gather(own)[0]
        final: T = result
        return final

    def on_each(self, work: Callable[[], T]) -> list[T]:
        """What `work` returns on each rank, by rank.

        Raises:
            CheckpointError: what it raises on the first rank that fails. On all ranks alike.
        """
        return [result for result, _ in self._gather(_outcome(work))]

    def _gather(self, own: tuple[Any, str | None]) -> list[tuple[Any, str | None]]:
        outcomes: list[tuple[Any, str | None]] = [own] * self.size
        if self.process_group is not None:
            dist.all_gather_object(outcomes, own, group=self.process_group)
        for _, error in outcomes:
            if error is not None:
                raise CheckpointError(error)
        return outcomes


def _outcome(work: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return work(), None
    except CheckpointError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{error.strerror}: {error.filename}"
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
