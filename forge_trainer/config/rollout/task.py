"""What the model is asked, and how its answers are judged."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..section import Section


class TaskConfig(Section):
    """Where prompts come from and how completions are judged."""

    name: str = "larger_digit"
    """`larger_digit`, or `reasoning_gym/<dataset>` such as `reasoning_gym/chain_sum`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task, e.g. min_terms for reasoning_gym/chain_sum."""
    reward: str | None = None
    """A reward's name or "package.module:function"; None takes the task's own."""
