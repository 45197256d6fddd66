"""TitanTrainer: the Monarch actor around one trainer rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from monarch.actor import Actor, concurrent_endpoint, current_rank, current_size

from forge_trainer.config import TrainerConfig, WeightsConfig
from forge_trainer.errors import EngineError
from forge_trainer.functional.packing import PackedRows
from forge_trainer.pieces import RankPieces, StagedWeights, StoreAddress, WeightsVersion
from forge_trainer.status import EngineFacts, RankFacts, RankStatus
from forge_trainer.types import (
    CallTicket,
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
from forge_trainer.weights.stores import open_store
from forge_trainer.worker import Worker

RANKS = "ranks"
"""The axis of a trainer's process mesh."""


class TitanTrainer(Actor):
    """One rank of a trainer mesh, driven by exactly one handle.

    Endpoints are concurrent so that `get_status` answers while a step runs on the worker's
    thread. Every other call carries a ticket: calls run in ticket order, and a second handle,
    whose calls could reach ranks in different orders, is refused.
    """

    def __init__(self, config: TrainerConfig, weights: WeightsConfig, model_dir: str) -> None:
        point = current_rank()
        size = 1
        for extent in current_size().values():
            size *= extent
        self._rank = point.rank
        self._weights = weights
        self._next: CallTicket | None = None
        self._worker = Worker(
            config,
            weights,
            model_dir=Path(model_dir),
            world=World(rank=point.rank, local_rank=point[RANKS], size=size),
        )

    def _take_turn(self, ticket: CallTicket) -> None:
        expected = self._next or CallTicket(ticket.handle_id, 0)
        if ticket != expected:
            raise EngineError(
                f"got call {ticket}, expected {expected}: only one handle may drive a trainer",
                rank=self._rank,
            )
        self._next = CallTicket(ticket.handle_id, ticket.number + 1)
        if ticket.collective_timeout_s is not None:
            self._worker.bound_collectives(ticket.collective_timeout_s)

    @concurrent_endpoint
    async def setup(self, ticket: CallTicket) -> EngineFacts:
        self._take_turn(ticket)
        return await self._worker.setup()

    @concurrent_endpoint
    async def forward(
        self, ticket: CallTicket, rows: PackedRows, with_entropy: bool
    ) -> list[MicrobatchOutput]:
        self._take_turn(ticket)
        return await self._worker.forward(rows, with_entropy)

    @concurrent_endpoint
    async def forward_backward(
        self,
        ticket: CallTicket,
        rows: PackedRows,
        loss: str | LossFn,
        loss_config: Mapping[str, Any] | None,
        return_logprobs: bool,
    ) -> EngineForwardBackward:
        self._take_turn(ticket)
        return await self._worker.forward_backward(rows, loss, loss_config, return_logprobs)

    @concurrent_endpoint
    async def optim_step(
        self, ticket: CallTicket, normalize: Normalize, params: OptimParams | None
    ) -> OptimStepResult:
        self._take_turn(ticket)
        return await self._worker.optim_step(normalize, params)

    @concurrent_endpoint
    async def clear_gradients(self, ticket: CallTicket) -> None:
        self._take_turn(ticket)
        await self._worker.clear_gradients()

    @concurrent_endpoint
    async def save(self, ticket: CallTicket, request: SaveRequest) -> CheckpointInfo:
        self._take_turn(ticket)
        return await self._worker.save(request)

    @concurrent_endpoint
    async def wait_for_save(self) -> CheckpointInfo | None:
        return await self._worker.wait_for_save()

    @concurrent_endpoint
    async def load(self, ticket: CallTicket, path: str, weights_only: bool) -> CheckpointInfo:
        self._take_turn(ticket)
        return await self._worker.load(path, weights_only)

    @concurrent_endpoint
    async def to(self, ticket: CallTicket, device: str) -> None:
        self._take_turn(ticket)
        await self._worker.to(device)

    @concurrent_endpoint
    async def train_mode(self, ticket: CallTicket) -> None:
        self._take_turn(ticket)
        await self._worker.train_mode()

    @concurrent_endpoint
    async def eval_mode(self, ticket: CallTicket) -> None:
        self._take_turn(ticket)
        await self._worker.eval_mode()

    @concurrent_endpoint
    async def open_store(self, address: StoreAddress) -> None:
        self._worker.use_store(open_store(address, self._weights))

    @concurrent_endpoint
    async def can_reach(self, token: str) -> bool:
        return os.access(token, os.R_OK | os.W_OK)

    @concurrent_endpoint
    async def stage_weights(
        self, ticket: CallTicket, version: WeightsVersion, wait: bool
    ) -> StagedWeights:
        self._take_turn(ticket)
        return await self._worker.stage_weights(version, wait)

    @concurrent_endpoint
    async def written_weights(self) -> RankPieces:
        return await self._worker.written_weights()

    @concurrent_endpoint
    async def abandon_weights(self, version: WeightsVersion) -> None:
        await self._worker.abandon_weights(version)

    @concurrent_endpoint
    async def facts(self) -> RankFacts:
        return await self._worker.facts()

    @concurrent_endpoint
    async def status(self) -> RankStatus:
        return await self._worker.status()

    @concurrent_endpoint
    async def abort(self) -> None:
        await self._worker.abort()

    @concurrent_endpoint
    async def close(self, ticket: CallTicket) -> None:
        self._take_turn(ticket)
        await self._worker.close()
