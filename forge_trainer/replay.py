"""Replay: groups of episodes between rollout and training. The only judge of staleness.

A plain object: no actor, no clock, no chance, and a state that can be saved.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge_trainer.types import Episode

Group = Sequence[Episode]
"""The episodes of one prompt."""

WINDOW = 0.3
"""Part of the slots that training may look ahead into, past a group that is not finished."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What is trained on next."""

    groups: list[Group]
    """In the order of admission."""
    abandoned: list[int]
    """Groups that nobody waits for any more."""


class Replay:
    """A number of slots. A group is admitted to one before it is sampled, and leaves it when it has
    been trained on, or is given up.

    With S = max_staleness and P = groups_per_step there are B = (S + 1) * P slots. Training may
    look W = max(1, floor(0.3 * B)) groups ahead: it takes any that is finished, but none that was
    admitted W or more after one that is not taken. So when a group is admitted, at most B - 1
    others are ahead of it, and at most W - 1 later ones can overtake it; it is among the next
    B + W - 1 that are trained on, P at a time, and

        age <= S + ceil((W - 1) / P)    batches.

    Source: the buffer of TitanRL; MiniMax (2026), arXiv:2605.26494, section 6.2.4. With S = 0 a
    batch is all that was admitted, and has age 0.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int = 0,
        updates_per_batch: int = 1,
        oversampled: int = 0,
        max_replaced: int = 0,
    ) -> None:
        """`oversampled` is a number of further slots; it adds twice itself to W - 1 above."""
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        slots = (max_staleness + 1) * groups_per_step
        self.num_slots = slots + oversampled
        self._window = self.num_slots
        self._oversampled = oversampled
        self._max_replaced = max_replaced
        self.max_age = 0
        """Updates that a token may be older than the weights its batch meets."""
        if max_staleness:
            self._window = max(1, math.floor(WINDOW * slots)) + oversampled
            late = math.ceil((self._window + oversampled - 1) / groups_per_step)
            self.max_age = (max_staleness + late) * updates_per_batch
        self._next = 0
        self._waiting: dict[int, Group | None] = {}
        self._picked: dict[int, Group] = {}
        self._training: deque[int] = deque()
        self._replaced_now = 0
        self.num_dropped = 0
        """Groups that were too old, or from a future that was taken back."""
        self.num_replaced = 0
        """Groups that were given up for want of a signal."""
        self.num_abandoned = 0
        """Groups that were too late."""

    @property
    def num_sampling(self) -> int:
        """Admitted, not finished."""
        return sum(group is None for group in self._waiting.values())

    @property
    def num_finished(self) -> int:
        """Ready to be trained on."""
        return len(self._picked) + len(self._waiting) - self.num_sampling

    def admit(self) -> int | None:
        """The number of a group that may be sampled now; None if all slots are taken."""
        if len(self._waiting) + len(self._picked) + sum(self._training) >= self.num_slots:
            return None
        index, self._next = self._next, self._next + 1
        self._waiting[index] = None
        return index

    def add(self, index: int, group: Group) -> None:
        """A group is finished. One that was given up meanwhile is forgotten."""
        if not group:
            raise ValueError("a group needs at least one episode, got none")
        if index in self._waiting:
            self._waiting[index] = group
            self._pick()

    def discard(self, index: int) -> None:
        """A group will not come; its slot is free."""
        self._waiting.pop(index, None)
        self._pick()

    def is_wanted(self, index: int) -> bool:
        """False for a group that was given up."""
        return index in self._waiting

    def may_replace(self) -> bool:
        """True, and counted, if one more group of this batch may be replaced."""
        if self._replaced_now >= self._max_replaced:
            return False
        self._replaced_now += 1
        self.num_replaced += 1
        return True

    def _pick(self) -> None:
        """Finished groups that training may have, each as soon as the window reaches it."""
        while self._waiting:
            end = next(iter(self._waiting)) + self._window
            finished = ((i, group) for i, group in self._waiting.items() if group is not None)
            found = next(finished, None)
            if found is None or (self._max_staleness and found[0] >= end):
                return
            del self._waiting[found[0]]
            self._picked[found[0]] = found[1]

    def take(self, policy_version: int) -> Batch | None:
        """The groups of one batch at `policy_version`, each handed out once; None if too few are
        there. What is too old is dropped here, and counted."""
        picked = self._picked.items()
        for index in [i for i, group in picked if self.is_stale(group, policy_version)]:
            del self._picked[index]
            self.num_dropped += 1
        if len(self._picked) < self._groups_per_step:
            return None
        in_turn = self._picked if self._max_staleness else sorted(self._picked)
        taken = sorted(itertools.islice(in_turn, self._groups_per_step))
        groups = [self._picked.pop(index) for index in taken]
        abandoned = self._abandon(max(taken))
        # Without staleness, nothing may begin before the new weights have arrived.
        self._training.append(len(groups) if self._max_staleness else self.num_slots)
        self._replaced_now = 0
        return Batch(groups, abandoned)

    def _abandon(self, newest: int) -> list[int]:
        """Give up those that were sampled beyond need and did not make it."""
        if not self._oversampled:
            return []
        late = [index for index, group in self._waiting.items() if group is None]
        if self._max_staleness:
            late = [index for index in late if index < newest][: self._oversampled]
        else:
            # Those that are finished would be a batch too old.
            self.num_abandoned += len(self._picked) + len(self._waiting) - len(late)
            self._picked.clear()
            self._waiting.clear()
        for index in late:
            self._waiting.pop(index, None)
        self.num_abandoned += len(late)
        self._pick()
        return late

    def release(self) -> None:
        """The oldest batch that was taken has been trained on, and whoever samples from now on
        uses its weights: its slots are free."""
        self._training.popleft()

    def is_stale(self, group: Group, policy_version: int) -> bool:
        """True if a token is more than `max_age` updates behind, or ahead.

        Ahead means that training has gone back to a checkpoint since.
        """
        versions = [episode.policy_version for episode in group if episode.transcripts]
        if not versions:
            return False
        return policy_version - min(versions) > self.max_age or max(versions) > policy_version

    def state_dict(self) -> dict[str, Any]:
        """Finished groups and counts. What is being sampled or trained on is not part of it."""
        waiting = {i: group for i, group in self._waiting.items() if group is not None}
        return {
            "next": self._next,
            "picked": dict(self._picked),
            "waiting": waiting,
            "counts": (self.num_dropped, self.num_replaced, self.num_abandoned),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]
        self._picked, self._waiting = dict(state["picked"]), dict(state["waiting"])
        self._training.clear()
        self.num_dropped, self.num_replaced, self.num_abandoned = state["counts"]
        self._pick()
