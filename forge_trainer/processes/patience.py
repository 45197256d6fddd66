"""How long a call to a trainer mesh waits, and what ends the wait; from the config alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from forge_trainer.config import TrainerConfig
from forge_trainer.functional.packing import PackedRows
from forge_trainer.status import EngineFacts

COMPUTES = ("forward", "forward_backward", "optim_step")
"""Calls full of collectives, and the first time of compilations; where one rank fails and the
others do not, these wait for it."""
FILE_CALLS = ("setup", "save", "load", "stage_weights")
"""Calls in which ranks read or write different amounts, and may be that far apart."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a call waits, in seconds."""

    apart_s: float
    """For the other ranks once one has answered."""
    explain_s: float
    """For the others once it is clear that the call has failed."""
    stall_s: float
    """While no rank makes progress."""
    collective_s: float
    """In each collective, on the ranks."""


class CallLimits:
    """Knows which calls have been through. The first of a kind compiles, and gets more time.

    Where shapes are compiled, calls of another shape are of another kind.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._compiles_shapes = bool(config.compile)
        self._been_through: set[Hashable] = set()

    def of(self, method: str, args: Sequence[Any]) -> Patience:
        """What a call with these arguments is granted; the ranks are told by its ticket."""
        config = self._config
        is_first = method in COMPUTES and self._kind(method, args) not in self._been_through
        apart_s = config.init_timeout_s if is_first else config.collective_timeout_s
        collective_s = apart_s - config.grace_s
        if method in FILE_CALLS:
            apart_s = config.checkpoint_timeout_s
        stall_s = max(config.stall_timeout_s, apart_s)
        return Patience(apart_s, config.grace_s, stall_s, collective_s)

    def note(self, method: str, args: Sequence[Any], results: Sequence[Any]) -> None:
        """The call has been through on all ranks."""
        self._been_through.add(self._kind(method, args))
        if any(isinstance(r, EngineFacts) and r.device.startswith("cuda") for r in results):
            # Flex attention is always compiled there.
            self._compiles_shapes = True

    def _kind(self, method: str, args: Sequence[Any]) -> Hashable:
        shapes = [rows.shape[1:] for rows in args if isinstance(rows, PackedRows)]
        return (method, *(shapes if self._compiles_shapes else ()))
