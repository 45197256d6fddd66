"""Who calls whom: a process in its group, a call among a handle's calls."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class World:
    """Where a process stands in its group."""

    rank: int = 0
    local_rank: int = 0
    """Index among the processes of its host; picks the GPU."""
    size: int = 1


@dataclass(frozen=True, slots=True)
class CallTicket:
    """Which handle makes a call to a trainer mesh, and the how-manieth of its calls it is."""

    handle_id: str
    number: int
    collective_timeout_s: float | None = field(default=None, compare=False)
    """How long a collective of this call may take; None leaves that as it is."""
