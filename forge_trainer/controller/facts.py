"""What a trainer says of itself, gathered from its ranks."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from forge_trainer.hf import read_hf_config
from forge_trainer.status import EngineFacts, RankStatus, TrainerFacts, TrainerStatus

from .publishing import WeightsPublisher
from .ranks import RankCalls, TrainerSetup, ask_all

LIBRARIES = ("torch", "torchtitan", "torchmonarch", "torchstore", "transformers")


async def trainer_facts(
    ranks: RankCalls, facts: EngineFacts, setup: TrainerSetup, transport: str
) -> TrainerFacts:
    """Facts that do not change while the trainer lives."""
    return TrainerFacts(
        model_path=str(setup.model_dir),
        model_type=facts.model_type,
        vocab_size=facts.vocab_size,
        max_sequence_tokens=facts.max_sequence_tokens,
        num_parameters=facts.num_parameters,
        model_config=read_hf_config(setup.model_dir),
        dp_size=facts.dp_size,
        degrees=setup.trainer.degrees,
        weights_transport=transport,
        ranks=await ask_all(ranks, "facts"),
        library_versions={name: importlib.metadata.version(name) for name in LIBRARIES},
    )


def merge_statuses(
    by_rank: Sequence[RankStatus],
    per_dp_rank: Sequence[RankStatus],
    *,
    publisher: WeightsPublisher,
    num_readers: int,
    saving: str | None,
) -> TrainerStatus:
    """What the ranks say, and what the handle knows, as one."""
    errors = [status.last_error for status in by_rank if status.last_error]
    first = by_rank[0]
    return TrainerStatus(
        step=first.step,
        phase=first.phase,
        seconds_in_phase=first.seconds_in_phase,
        accumulated_sequences=sum(s.accumulated_sequences for s in per_dp_rank),
        accumulated_tokens=sum(s.accumulated_tokens for s in per_dp_rank),
        published=publisher.published,
        held=publisher.held,
        push=publisher.push,
        is_pushing=publisher.pushing,
        num_readers=num_readers,
        saving=saving,
        last_error=errors[0] if errors else None,
    )
