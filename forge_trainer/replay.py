"""Replay: groups of episodes between rollout and training. The only judge of staleness.

A plain object: no actor, no clock, its own random generator, and a state that can be saved.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from forge_trainer.types import Episode

Group = Sequence[Episode]
"""The episodes of one prompt."""


class Replay:
    """Groups that are fresh enough to train on, each handed out once."""

    def __init__(self, *, max_policy_age: int, seed: int) -> None:
        self._max_policy_age = max_policy_age
        self._groups: list[Group] = []
        self._rng = random.Random(seed)
        self.num_dropped = 0
        """Groups that became too old before they were used."""

    def add(self, group: Group) -> None:
        """Keep a group for later."""
        if not group:
            raise ValueError("a group needs at least one episode, got none")
        self._groups.append(group)

    def num_fresh(self, policy_version: int) -> int:
        """Groups that may be trained on at `policy_version`."""
        return sum(not self.is_stale(group, policy_version) for group in self._groups)

    def take(self, num_groups: int, policy_version: int) -> list[Group] | None:
        """The `num_groups` oldest fresh groups, each handed out once; None if there are too few.

        Oldest means by policy version; among equals chance decides, since the order of arrival
        would favour short completions. Stale groups are dropped here and counted.
        """
        fresh = [group for group in self._groups if not self.is_stale(group, policy_version)]
        self.num_dropped += len(self._groups) - len(fresh)
        self._groups = fresh
        if len(fresh) < num_groups:
            return None
        drawn = sorted(fresh, key=lambda group: (_oldest_version(group), self._rng.random()))
        self._groups = drawn[num_groups:]
        return drawn[:num_groups]

    def is_stale(self, group: Group, policy_version: int) -> bool:
        """True if any episode's weights are more than max_policy_age updates behind, or ahead.

        Ahead means that training has gone back to a checkpoint since.
        """
        versions = [episode.policy_version for episode in group]
        return (
            policy_version - min(versions) > self._max_policy_age or max(versions) > policy_version
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "groups": list(self._groups),
            "rng": self._rng.getstate(),
            "num_dropped": self.num_dropped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._groups = list(state["groups"])
        self._rng.setstate(state["rng"])
        self.num_dropped = state["num_dropped"]


def _oldest_version(group: Group) -> int:
    return min(episode.policy_version for episode in group)
