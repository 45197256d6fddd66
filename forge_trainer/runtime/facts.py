"""What a trainer says of itself, gathered from its ranks."""

from __future__ import annotations

import asyncio
import importlib.metadata
from pathlib import Path

from forge_trainer.protocols import EngineFacts
from forge_trainer.status import TrainerFacts

from .ranks import RankCalls

LIBRARIES = ("torch", "torchtitan", "torchmonarch", "torchstore", "transformers")


async def trainer_facts(ranks: RankCalls, facts: EngineFacts, model_dir: Path) -> TrainerFacts:
    """Facts that do not change while the trainer lives."""
    asked = [ranks.ask(rank, "facts") for rank in range(ranks.size)]
    return TrainerFacts(
        model_path=str(model_dir),
        model_type=facts.model_type,
        vocab_size=facts.vocab_size,
        max_sequence_tokens=facts.max_sequence_tokens,
        num_parameters=facts.num_parameters,
        dp_size=facts.dp_size,
        ranks=list(await asyncio.gather(*asked)),
        library_versions={name: importlib.metadata.version(name) for name in LIBRARIES},
    )
