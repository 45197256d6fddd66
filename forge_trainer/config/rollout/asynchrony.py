"""How far rollout may run ahead of training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..section import Section


class AsyncConfig(Section):
    max_staleness: Annotated[int, Field(ge=0)] = 0
    """S: batches that rollout may be ahead. 0: sampling and training take turns, and all is
    on-policy. Otherwise (S + 1) * groups_per_step groups are sampled, waiting or being trained on
    at one time, which bounds the age of tokens that are trained on; see docs/asynchrony.md."""
    oversampling: Annotated[float, Field(ge=0.0, le=4.0)] = 0.0
    """Groups that are sampled beyond those a batch needs, as a share of it; the last to finish are
    given up. It shortens the wait for stragglers, and favours what is answered shortly."""
    max_replaced_groups: Annotated[int, Field(ge=0)] = 0
    """Groups per batch that may be replaced by others because all their rewards are equal, which
    gives no gradient (dynamic sampling: Yu et al. (2025), DAPO, arXiv:2503.14476, section 3.2)."""
