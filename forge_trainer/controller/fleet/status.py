"""What a fleet says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from forge_trainer.errors import EngineError
from forge_trainer.status import GeneratorStatus, ReplicaStatus

from .members import Members
from .replica import Replica


def fleet_status(
    members: Members, statuses: dict[Replica, GeneratorStatus | None]
) -> GeneratorStatus:
    """Sums over those that answer, and every replica as it is; `statuses` are of those left.

    Raises:
        EngineError: none of them answers.
    """
    answers = [status for status in statuses.values() if status is not None]
    if not answers:
        raise EngineError("no generator says what it does", phase="get_status")
    pulls = [status.pull for status in answers if status.pull is not None]
    return GeneratorStatus(
        version=members.version,
        pull=max(pulls, key=lambda pull: pull.seconds, default=None),
        phase=_phase(answers),
        num_completions=sum(status.num_completions for status in answers),
        host=answers[0].host,
        pid=answers[0].pid,
        num_running=sum(status.num_running for status in answers),
        num_waiting=sum(status.num_waiting for status in answers),
        num_steps=sum(status.num_steps for status in answers),
        replicas=tuple(_replica(one, members, statuses.get(one)) for one in members.all),
    )


def _phase(answers: Sequence[GeneratorStatus]) -> str:
    """Of the first that does something."""
    return next((status.phase for status in answers if status.phase != "idle"), "idle")


def _replica(replica: Replica, members: Members, status: GeneratorStatus | None) -> ReplicaStatus:
    reason = replica.lost or replica.pull_error
    return ReplicaStatus(
        name=replica.name,
        state=_state(replica, members),
        num_open=replica.num_open,
        reason=None if reason is None else str(reason),
        status=status,
    )


def _state(replica: Replica, members: Members) -> Literal["serving", "behind", "lost"]:
    if replica.lost is not None:
        return "lost"
    return "behind" if members.is_behind(replica) else "serving"
