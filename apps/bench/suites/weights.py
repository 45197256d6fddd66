"""What it costs to bring weights from a trainer to a reader, against copying them in memory.

Two FSDP2 ranks publish, this process reads in place. The engine holds nothing but tensors and
knows its pieces beforehand, so what is measured is the way of the weights and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from apps.bench.measure import Measure, Row, Spread, interleaved, ratios
from apps.bench.sharded import SETS_FILE
from forge_trainer.config import GeneratorConfig, TinyModelConfig, TrainerConfig, WeightsConfig
from forge_trainer.controller.trainer import TrainerHandle
from forge_trainer.functional.pieces.manifests import build_manifest
from forge_trainer.hf import create_tiny_model
from forge_trainer.pieces import WeightPiece, WeightsRef, WeightsVersion
from forge_trainer.processes.lifecycle import running_services
from forge_trainer.protocols import WeightStore
from forge_trainer.types import OptimParams, TrainSequence
from forge_trainer.weights.stores import open_store
from forge_trainer.weights.torchstore.store import TorchStoreWeightStore

ROUNDS = 9
SETTLE = 3
"""Pushes of a set before one is measured: as many segments as are in turn."""
TRAINER = TrainerConfig(
    device="cpu", num_ranks=2, engine="apps.bench.sharded:ShardedTensors", max_sequence_tokens=64
)
TWO_MB, FIFTY_KB, FIFTEEN_MB = (512, 1024), (50, 256), (15000, 256)
LARGE = [TWO_MB] * 32
SETS = [LARGE, [FIFTY_KB] * 300, [FIFTEEN_MB]]
OVERLAPPED = [[TWO_MB] * 128]
"""256 MB: a push is worth hiding once it takes longer than the calls that begin it."""
DOUBLINGS = [[TWO_MB] * (8 * 2**power) for power in range(7)]
"""16 MB to 1 GB."""
SEQUENCES = [TrainSequence([1, 2, 3, 4], [0, 1, 1, 1])] * 2


@dataclass
class Sync:
    """A trainer, and a reader's tensors to be filled by it."""

    trainer: TrainerHandle
    store: WeightStore
    sets: Sequence[Sequence[tuple[int, int]]]

    def __post_init__(self) -> None:
        self.live = [
            {f"t{i}": torch.zeros(shape) for i, shape in enumerate(shapes)} for shapes in self.sets
        ]

    async def update(self, chosen: int) -> None:
        """Make a new version of one set."""
        await self.trainer.optim_step(normalize="none", params=OptimParams(lr=float(chosen)))

    async def pull(self, chosen: int, ref: WeightsRef) -> None:
        """Fill this reader's tensors in place."""
        async with self.store.reading(ref.version) as reading:
            await reading.load_into(self.live[chosen])

    async def push_and_pull(self, chosen: int) -> float:
        """Seconds; the values are those of the update."""
        await self.update(chosen)
        start = time.perf_counter()
        ref = await self.trainer.push_weights()
        await self.pull(chosen, ref)
        seconds = time.perf_counter() - start
        wanted = float(ref.version.policy_version)
        assert all(bool((t[-1] == wanted).all()) for t in self.live[chosen].values())
        return seconds

    def settled(self, chosen: int) -> Measure:
        """The same, once memory and layouts are those of the set."""

        async def seconds() -> float:
            for _ in range(SETTLE):
                await self.push_and_pull(chosen)
            return await self.push_and_pull(chosen)

        return seconds


@contextlib.asynccontextmanager
async def running_sync(
    sets: Sequence[Sequence[tuple[int, int]]], weights: WeightsConfig
) -> AsyncIterator[Sync]:
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = create_tiny_model(Path(scratch) / "model", TinyModelConfig(), seed=0)
        (model_dir / SETS_FILE).write_text(json.dumps(sets))
        async with running_services(
            TRAINER,
            GeneratorConfig(device="cpu"),
            weights,
            model_dir=model_dir,
            checkpoint_folder=Path(scratch) / "checkpoints",
        ) as services:
            store = open_store(services.store.address, weights)
            yield Sync(services.trainer, store, sets)


async def run() -> list[Row]:
    """All rows, in the order of the table in docs/benchmarks.md."""
    torch.set_num_threads(1)
    shared = WeightsConfig(transport="shared_memory", verify="off")
    async with running_sync(SETS, shared) as sync:
        over_memcpy = ratios(await interleaved(sync.settled(0), _memcpy, rounds=ROUNDS))
        small = ratios(await interleaved(sync.settled(1), sync.settled(2), rounds=ROUNDS))
    async with running_sync(SETS, shared.model_copy(update={"verify": "full"})) as sync:
        verified = ratios(await interleaved(sync.settled(0), _memcpy, rounds=ROUNDS))
    async with running_sync(SETS, WeightsConfig(transport="torchstore", verify="off")) as sync:
        assert isinstance(sync.store, TorchStoreWeightStore)
        over_bare = await _torchstore_over_bare(sync.store)
        many = ratios(await interleaved(sync.settled(1), sync.settled(2), rounds=ROUNDS))
    async with running_sync(OVERLAPPED, shared.model_copy(update={"stage": "in_place"})) as sync:
        stall = await _stall_over_sync(sync)
    async with running_sync(SETS, shared.model_copy(update={"keep_versions": 100})) as sync:
        memory = await _push_memory(sync)
    async with running_sync(DOUBLINGS, shared) as sync:
        doubling = await _cost_per_doubling(sync)
    pushed = "push + in-place pull of 32 x 2 MB, 2 ranks, shared memory"
    return [
        Row("push_pull_over_memcpy", f"{pushed} / memcpy", over_memcpy, bar=2.5),
        Row("push_pull_verified_over_memcpy", "the same with verify: full", verified, bar=3.5),
        Row("small_tensors_over_one", "300 x 50 KB / 1 x 15 MB, shared memory", small, bar=1.5),
        Row("torchstore_over_bare", "transport torchstore / bare puts and gets", over_bare, 1.1),
        Row("torchstore_many_over_one", "300 x 50 KB / 1 x 15 MB, torchstore", many, bar=3.0),
        Row(
            "stall_over_sync",
            "time the loop waits / push to pulled, 256 MB, in place",
            stall,
            bar=0.15,
        ),
        Row("push_rss_over_model", "PSS of all processes at its peak / model bytes", memory, 1.1),
        Row("cost_per_doubling", "16 MB to 1 GB, per doubling of bytes", doubling, bar=2.2),
    ]


_SOURCES = [torch.ones(shape) for shape in LARGE]
_TARGETS = [torch.zeros(shape) for shape in LARGE]


async def _memcpy() -> float:
    start = time.perf_counter()
    for target, source in zip(_TARGETS, _SOURCES, strict=True):
        target.copy_(source)
    return time.perf_counter() - start


async def _torchstore_over_bare(store: TorchStoreWeightStore) -> Spread:
    """Both in this process, with the same tensors."""
    client = await store.client()
    names = [f"t{i}" for i in range(len(_SOURCES))]
    steps = iter(range(10**6))
    live = dict(zip(names, _TARGETS, strict=True))

    async def ours() -> float:
        version = WeightsVersion(9, next(steps))
        pieces = [
            WeightPiece(name, shape, (0, 0), tensor, torch.float32)
            for name, shape, tensor in zip(names, LARGE, _SOURCES, strict=True)
        ]
        start = time.perf_counter()
        part = await store.write(store.stage(version, 0, pieces))
        await store.commit(build_manifest(version, store.transport, [part]))
        async with store.reading(version) as reading:
            await reading.load_into(live)
        seconds = time.perf_counter() - start
        await store.drop(version)
        return seconds

    async def bare() -> float:
        prefix = f"bare.{next(steps)}"
        start = time.perf_counter()
        pairs = zip(names, _SOURCES, strict=True)
        await asyncio.gather(*(client.put(f"{prefix}.{name}", t) for name, t in pairs))
        await asyncio.gather(*(client.get(f"{prefix}.{name}", live[name]) for name in names))
        seconds = time.perf_counter() - start
        await asyncio.gather(*(client.delete(f"{prefix}.{name}") for name in names))
        return seconds

    return ratios(await interleaved(ours, bare, rounds=ROUNDS))


async def _stall_over_sync(sync: Sync) -> Spread:
    """How much longer a push makes the loop: staging, and the update that waits for the rest."""

    async def step(push: bool) -> tuple[float, float]:
        """(seconds of the loop beside its forward_backward, seconds from push to pulled)."""
        start = time.perf_counter()
        pulling = None
        if push:
            ref = await sync.trainer.push_weights(wait=False)
            pulling = asyncio.create_task(_pulled(sync, ref, start))
        staged = time.perf_counter()
        await sync.trainer.forward_backward(SEQUENCES, loss="cross_entropy")
        computed = time.perf_counter()
        await sync.update(0)
        stalled = (staged - start) + (time.perf_counter() - computed)
        return stalled, 0.0 if pulling is None else await pulling

    taken = []
    await sync.update(0)
    for _ in range(2 + ROUNDS):
        stalled, sync_s = await step(push=True)
        plain, _ = await step(push=False)
        taken.append((max(stalled - plain, 0.0), sync_s))
    return ratios(taken[2:])


async def _pulled(sync: Sync, ref: WeightsRef, start: float) -> float:
    await sync.trainer.wait_for_push()
    await sync.pull(0, ref)
    return time.perf_counter() - start


async def _push_memory(sync: Sync) -> Spread:
    """Every push needs a new segment, since no version is dropped: the dearest kind."""
    model_bytes = sum(math.prod(shape) * 4 for shape in LARGE)
    extra = []
    for _ in range(ROUNDS):
        await sync.update(0)
        before = _pss_of_all()
        pushing = asyncio.create_task(sync.trainer.push_weights())
        peak = before
        while not pushing.done():
            peak = max(peak, await asyncio.to_thread(_pss_of_all))
        await pushing
        extra.append((max(peak, _pss_of_all()) - before) / model_bytes)
    return Spread.of(extra[2:])


def _pss_of_all() -> int:
    """Bytes that this process and its descendants use; what they share is counted once."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    total = 0
    for pid in found:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


async def _cost_per_doubling(sync: Sync) -> Spread:
    """The geometric mean over six doublings, of seven rounds or more."""
    costs = []
    for chosen in range(len(DOUBLINGS)):
        for _ in range(SETTLE):
            await sync.push_and_pull(chosen)
        costs.append([await sync.push_and_pull(chosen) for _ in range(ROUNDS)])
        sync.live[chosen] = dict[str, Tensor]()
    return Spread.of(
        [
            (large / small) ** (1 / (len(DOUBLINGS) - 1))
            for small, large in zip(costs[0], costs[-1], strict=True)
        ]
    )
