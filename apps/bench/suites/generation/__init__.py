"""What the transformers backend costs: memory of a step, time against the library's `generate`.

One process and one thread, without actors; sampling with log-probs, float32.
"""

from __future__ import annotations

from apps.bench.measure import Row

from . import memory, ragged


async def run() -> list[Row]:
    return [*memory.rows(), *await ragged.rows()]
