"""What a save beside training costs the training: its stall against a copy of the same state."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from apps.bench.measure import Row, ratios
from forge_trainer.config import TinyModelConfig, TrainerConfig
from forge_trainer.hf import create_tiny_model
from forge_trainer.types import SaveRequest, World

RANKS, ROUNDS, WARMUP = 2, 7, 2
TINY = TinyModelConfig(
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=3,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
)
CONFIG = TrainerConfig(device="cpu", num_ranks=RANKS)
MIN_STATE_BYTES = 256 * 2**20
"""Of each rank."""


async def run() -> list[Row]:
    """Two FSDP ranks; each pair is the slower rank's stall and the slower rank's copy."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = create_tiny_model(Path(scratch) / "model", TINY, seed=0)
        pipes, processes = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_measure, args=(theirs, rank, model_dir, Path(scratch)), daemon=True
            )
            process.start()
            # Or a rank that dies would leave us waiting for its answer.
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        by_rank: list[tuple[int, list[tuple[float, float]]]] = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    num_bytes = min(size for size, _ in by_rank)
    rounds = zip(*(pairs for _, pairs in by_rank), strict=True)
    pairs = [(max(s for s, _ in ranks), max(c for _, c in ranks)) for ranks in rounds]
    meaning = f"save(wait=False) / a warm copy of the state, {num_bytes / 2**20:.0f} MiB a rank"
    return [Row("async_stall_over_memcpy", meaning, ratios(pairs), bar=2.0)]


def _measure(pipe: Connection, rank: int, model_dir: Path, scratch: Path) -> None:
    """Send (bytes of this rank's state, (stall, copy) in seconds of every round)."""
    from forge_trainer.engine.titan.engine import TitanEngine

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch}/rendezvous", rank=rank, world_size=RANKS
    )
    engine = TitanEngine(CONFIG, model_dir, World(rank, rank, RANKS))
    engine.setup()
    state = _local_tensors(engine)
    copies = [torch.empty_like(tensor) for tensor in state]
    num_bytes = sum(tensor.nbytes for tensor in state)
    assert num_bytes >= MIN_STATE_BYTES, num_bytes
    pairs = []
    for index in range(WARMUP + ROUNDS):
        request = SaveRequest(str(scratch / f"round-{index}"), wait=False)
        stall_s = _seconds(partial(engine.save, request))
        engine.wait_for_save()
        pairs.append((stall_s, _seconds(partial(_copy, state, copies))))
    pipe.send((num_bytes, pairs[WARMUP:]))
    engine.close()


def _local_tensors(engine: Any) -> list[Tensor]:
    """What a full checkpoint holds of this rank."""
    state = engine._training_state(weights_only=False)
    tensors = [*state["model"].values(), *state["optimizer"].values()]
    return [
        getattr(t, "to_local", lambda t=t: t)().detach() for t in tensors if isinstance(t, Tensor)
    ]


def _copy(tensors: list[Tensor], copies: list[Tensor]) -> None:
    for tensor, copy in zip(tensors, copies, strict=True):
        copy.copy_(tensor)


def _seconds(work: Callable[[], object]) -> float:
    """All ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
