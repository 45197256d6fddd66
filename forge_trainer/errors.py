"""Every error the project raises on purpose, in one small tree.

All of them cross process borders, so they carry plain values and pickle. A message says what
went wrong, what was given, what was wanted, and what to do.
"""

from __future__ import annotations

from typing import Any


class ForgeTrainerError(Exception):
    """Base of all errors raised by forge_trainer."""


class ConfigError(ForgeTrainerError):
    """The configuration cannot work. Raised before any process starts."""


class DataError(ForgeTrainerError):
    """The data given to a call cannot be trained on. Raised before any collective."""


class RolloutError(ForgeTrainerError):
    """An environment or a reward raised, hung or gave no number, and that was to end the run."""


class CheckpointError(ForgeTrainerError):
    """A checkpoint is missing, incomplete or does not fit."""


class WeightsError(ForgeTrainerError):
    """A weights version is torn, missing, stale or fails its checksum."""


class AlreadyPublishedError(WeightsError):
    """A version exists; it stays as it is."""


class TornWeightsError(WeightsError):
    """A reader's own tensors hold a mixture of two versions, until it pulls again."""


class _LocatedError(ForgeTrainerError):
    """An error that knows where it happened; unknown facts are None."""

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        phase: str | None = None,
        step: int | None = None,
        host: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.phase = phase
        self.step = step
        self.host = host
        """Of the rank, where a run has several."""

    @property
    def _facts(self) -> dict[str, int | str | None]:
        return {"rank": self.rank, "host": self.host, "phase": self.phase, "step": self.step}

    def __str__(self) -> str:
        known = ", ".join(
            f"{name} {fact}" for name, fact in self._facts.items() if fact is not None
        )
        return f"{self.message} ({known})" if known else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_located, (type(self), self.message, self._facts)


def _rebuild_located(
    cls: type[_LocatedError], message: str, facts: dict[str, Any]
) -> _LocatedError:
    return cls(message, **facts)


class EngineError(_LocatedError):
    """A rank failed while computing; the mesh is still usable."""


class NonFiniteError(_LocatedError):
    """The accumulated gradient is not finite; parameters and optimizer state are untouched."""


class MismatchError(_LocatedError):
    """The generator samples from another policy than the one trained, more so than is allowed."""


class WorkerLostError(_LocatedError):
    """A process of a mesh died or stopped answering; the mesh is lost."""


class CollectiveError(WorkerLostError):
    """A collective broke under this rank because another one is gone or late."""
