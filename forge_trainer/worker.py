"""One rank of a trainer: an engine and a weight store behind one work thread. No Monarch here.

All engine calls run on the work thread, in the order in which they came, so the event loop stays
free: `status` answers while a step runs. Publishing to the store runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from forge_trainer.config import TrainerConfig, WeightsConfig
from forge_trainer.engine import find_engine
from forge_trainer.engine.failures import describe, is_collective_failure
from forge_trainer.engine.profiling import StepProfiler, peak_memory_bytes, require_memory_snapshots
from forge_trainer.errors import (
    CollectiveError,
    EngineError,
    ForgeTrainerError,
    WeightsError,
)
from forge_trainer.functional.losses.objective import make_loss
from forge_trainer.functional.packing import PackedRows
from forge_trainer.pieces import RankPieces, StagedPieces, StagedWeights, WeightsVersion
from forge_trainer.protocols import WeightStore
from forge_trainer.status import EngineFacts, RankFacts, RankStatus
from forge_trainer.types import (
    CheckpointInfo,
    EngineForwardBackward,
    LossFn,
    MicrobatchOutput,
    Normalize,
    OptimParams,
    OptimStepResult,
    SaveRequest,
    World,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Worker:
    """Call `use_store` and `setup` first, and `close` last."""

    _store: WeightStore

    def __init__(
        self,
        config: TrainerConfig,
        weights: WeightsConfig,
        *,
        model_dir: Path,
        world: World,
    ) -> None:
        self._config = config
        self._weights = weights
        self._model_dir = model_dir
        self._world = world
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._phase, self._phase_since = "idle", time.monotonic()
        self._profiler = StepProfiler(config.profiling, world.rank)
        self._is_set_up = False
        self._staged: StagedPieces | None = None
        self._writing: asyncio.Task[RankPieces] | None = None
        self._last_error: str | None = None
        self._after_abort: RankStatus | None = None
        self._engine = find_engine(config.engine)(config, model_dir, world)

    async def setup(self) -> EngineFacts:
        """Build the engine; the same call on all ranks."""
        return await self._run("setup", self._setup_engine)

    def _setup_engine(self) -> EngineFacts:
        self._engine.setup()
        self._is_set_up = True
        logger.info("rank %d of %d is set up", self._world.rank, self._world.size)
        facts = self._engine.facts()
        require_memory_snapshots(self._config.profiling, facts.device)
        return facts

    def bound_collectives(self, timeout_s: float) -> None:
        """From the next call on; `setup` has limits of its own."""
        if self._is_set_up:
            self._engine.bound_collectives(timeout_s)

    async def forward(self, rows: PackedRows, with_entropy: bool) -> list[MicrobatchOutput]:
        def forward() -> list[MicrobatchOutput]:
            self._begin_step()
            return self._engine.forward(rows.batches(), with_entropy=with_entropy)

        return await self._run("forward", forward)

    async def forward_backward(
        self,
        rows: PackedRows,
        loss: str | LossFn,
        loss_config: Mapping[str, Any] | None,
        return_logprobs: bool,
    ) -> EngineForwardBackward:
        loss_fn = make_loss(loss, loss_config)

        def forward_backward() -> EngineForwardBackward:
            self._begin_step()
            share = self._engine.forward_backward(
                rows.batches(), loss_fn, return_logprobs=return_logprobs
            )
            return dataclasses.replace(share, peak_memory_bytes=peak_memory_bytes())

        return await self._run("forward_backward", forward_backward)

    async def optim_step(self, normalize: Normalize, params: OptimParams | None) -> OptimStepResult:
        def optim_step() -> OptimStepResult:
            try:
                return self._engine.optim_step(normalize=normalize, params=params)
            finally:
                self._profiler.end()

        return await self._run("optim_step", optim_step)

    def _begin_step(self) -> None:
        if self._config.trainable:
            self._profiler.begin(self._engine.step + 1)

    async def clear_gradients(self) -> None:
        await self._run("clear_gradients", self._engine.clear_gradients)

    async def save(self, request: SaveRequest) -> CheckpointInfo:
        return await self._run("save", lambda: self._engine.save(request))

    async def wait_for_save(self) -> CheckpointInfo | None:
        """What became of the last save that did not wait; beside whatever runs."""
        return await asyncio.to_thread(self._engine.wait_for_save)

    async def load(self, path: str, weights_only: bool) -> CheckpointInfo:
        return await self._run("load", lambda: self._engine.load(path, weights_only=weights_only))

    async def to(self, device: str) -> None:
        await self._run("to", lambda: self._engine.to(device))

    async def train_mode(self) -> None:
        await self._run("train_mode", self._engine.train_mode)

    async def eval_mode(self) -> None:
        await self._run("eval_mode", self._engine.eval_mode)

    def use_store(self, store: WeightStore) -> None:
        """Publish through this store from now on."""
        if self._writing is not None:
            # It would hold up the next push for as long as a lost store does not answer.
            self._writing.cancel()
        self._store = store

    async def stage_weights(self, version: WeightsVersion, wait: bool) -> StagedWeights:
        """Take this rank's pieces on the work thread, and bring them to the store.

        Without `wait`, the latter goes on beside the next calls; see `written_weights`.
        """

        def stage() -> StagedPieces:
            dtype: torch.dtype = getattr(torch, self._weights.dtype)
            return self._store.stage(
                version,
                self._world.rank,
                self._engine.weight_pieces(dtype=dtype),
                in_place=self._weights.stage == "in_place",
            )

        await self._wait_for_writing()
        staged = self._staged = await self._run("stage_weights", stage)
        self._writing = asyncio.create_task(self._store.write(staged), name=f"write {version}")
        written = await self.written_weights() if wait else None
        return StagedWeights(self._engine.step, staged.layout.encoded, written)

    async def written_weights(self) -> RankPieces:
        """What became of the pieces that were staged last.

        Raises:
            WeightsError: they could not be written.
        """
        assert self._writing is not None
        await self._wait_for_writing()
        return await self._writing

    async def abandon_weights(self, version: WeightsVersion) -> None:
        """Remove what this rank has of a version that will not be published."""
        staged = self._staged
        await self._wait_for_writing()
        if staged is not None and staged.version == version:
            await self._store.abandon(staged)

    async def _wait_for_writing(self) -> None:
        """Return once nothing is being written, whatever came of it.

        Raises:
            WeightsError: the store does not answer.
        """
        # Less than what the controller waits for this rank once another has answered.
        timeout_s = 0.9 * self._config.checkpoint_timeout_s
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=timeout_s)
            if not self._writing.done():
                raise WeightsError(f"this rank did not write its weights within {timeout_s:.0f} s")

    async def facts(self) -> RankFacts:
        facts = self._engine.facts()
        return RankFacts(
            rank=self._world.rank,
            coordinates=facts.coordinates,
            device=facts.device,
            host=socket.gethostname(),
            pid=os.getpid(),
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            cpu_threads=torch.get_num_threads(),
        )

    async def status(self) -> RankStatus:
        """A snapshot; never waits for the work thread."""
        if self._after_abort is not None:
            return self._after_abort
        progress = self._engine.progress
        sequences, tokens = self._engine.accumulated if self._is_set_up else (0, 0)
        return RankStatus(
            step=self._engine.step if self._is_set_up else 0,
            phase=self._phase,
            seconds_in_phase=time.monotonic() - self._phase_since,
            seconds_without_progress=time.monotonic() - progress.ticked_at,
            microbatch=progress.microbatch,
            num_microbatches=progress.num_microbatches,
            accumulated_sequences=sequences,
            accumulated_tokens=tokens,
            last_error=self._last_error,
        )

    async def abort(self) -> None:
        """Let ranks that wait for this one in a collective fail at once; the mesh is lost.

        Comes after a failure; of the engine, nothing but what `status` tells is left.
        """
        self._after_abort = await self.status()
        await self._run("abort", self._engine.abort)

    async def close(self) -> None:
        """Wait for the work thread and what is being written, and free the engine."""
        with contextlib.suppress(WeightsError):
            await self._wait_for_writing()
        await self._run("close", self._close)
        self._thread.shutdown(wait=True)

    def _close(self) -> None:
        self._profiler.end()
        self._engine.close()
        self._store.close()

    async def _run(self, phase: str, work: Callable[[], T]) -> T:
        """The result of `work` on the work thread; its errors say where they come from."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._work, phase, work
        )

    def _work(self, phase: str, work: Callable[[], T]) -> T:
        self._phase, self._phase_since = phase, time.monotonic()
        self._engine.progress.begin()
        try:
            return work()
        except ForgeTrainerError as error:
            self._last_error = str(error)
            logger.error("%s failed: %s", phase, error, exc_info=True)
            raise
        except Exception as error:
            self._last_error = describe(error, rank=self._world.rank, phase=phase)
            logger.error("%s failed: %s", phase, self._last_error, exc_info=True)
            kind = CollectiveError if is_collective_failure(error) else EngineError
            step = self._engine.step if self._is_set_up else None
            # They hold what was being computed, and process groups, for as long as the error lives.
            traceback.clear_frames(error.__traceback__)
            raise kind(self._last_error, rank=self._world.rank, phase=phase, step=step) from error
        finally:
            self._phase, self._phase_since = "idle", time.monotonic()
            self._engine.progress.begin()
