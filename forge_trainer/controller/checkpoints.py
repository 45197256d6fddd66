"""A trainer's checkpoints as its handle sees them: where they go, which stay, what still runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from forge_trainer.engine.checkpoint.files import default_name, find_checkpoint, prune_checkpoints
from forge_trainer.errors import CheckpointError
from forge_trainer.types import CheckpointFormat, CheckpointInfo, SaveRequest

from .ranks import RankCalls, TrainerSetup, agreed, ask_all


class Checkpoints:
    """Saves and loads on all ranks. One save at a time runs beside other calls."""

    def __init__(self, ranks: RankCalls, setup: TrainerSetup) -> None:
        self._ranks = ranks
        self._folder = setup.checkpoint_folder
        self._keep = setup.trainer.keep_checkpoints
        self._running: asyncio.Task[CheckpointInfo] | None = None
        self.saving: str | None = None
        """Path of the save that runs beside other calls."""

    def request(
        self,
        step: int,
        *,
        name: str | None,
        path: str | None,
        weights_only: bool,
        format: CheckpointFormat,
        wait: bool,
    ) -> SaveRequest:
        """What `TrainerHandle.save` asks for.

        Raises:
            CheckpointError: it makes no sense.
        """
        if name is not None and path is not None:
            raise CheckpointError(f"give name or path, not both; got {name!r} and {path!r}")
        if name is not None and (not name or Path(name).name != name or name.startswith(".")):
            raise CheckpointError(f"name is {name!r}; it must be one folder's name, use path")
        if path is not None and not Path(path).name:
            raise CheckpointError(f"path is {path!r}; it must end in the checkpoint's own folder")
        name = name or default_name(step, format=format, weights_only=weights_only)
        return SaveRequest(path or str(self._folder / name), weights_only, format, wait)

    async def save(self, request: SaveRequest) -> CheckpointInfo:
        """See `TrainerHandle.save`. First waits for a save that still runs."""
        if request.is_full:
            await self._require_no_gradients()
        await self.wait()
        infos: list[CheckpointInfo] = await self._ranks.call(
            "save", [(request,)] * self._ranks.size
        )
        if request.wait:
            await self._prune()
        else:
            self.saving = request.path
            self._running = asyncio.create_task(self._complete(), name=f"save {request.path}")
        return agreed("save", infos)

    async def _require_no_gradients(self) -> None:
        if any(status.accumulated_tokens for status in await ask_all(self._ranks, "status")):
            raise CheckpointError(
                "gradients are accumulated and would be lost; call optim_step or "
                "clear_gradients before save"
            )

    async def wait(self) -> CheckpointInfo | None:
        """What became of the save that ran beside other calls; None if there was none.

        Raises:
            CheckpointError: it failed. Told once.
        """
        if self._running is None:
            return None
        try:
            return await asyncio.shield(self._running)
        finally:
            if self._running is not None and self._running.done():
                self._running = None

    async def load(
        self, *, path: str | None, name: str | None, step: int | None, weights_only: bool
    ) -> CheckpointInfo:
        """See `TrainerHandle.load`. Waits for a save that still runs, which may be the newest."""
        if self._running is not None:
            await asyncio.wait([self._running])
        source = find_checkpoint(
            self._folder, path=path, name=name, step=step, weights_only=weights_only
        )
        infos: list[CheckpointInfo] = await self._ranks.call(
            "load", [(str(source), weights_only)] * self._ranks.size
        )
        return agreed("load", infos)

    async def _complete(self) -> CheckpointInfo:
        try:
            infos: list[CheckpointInfo] = await ask_all(self._ranks, "wait_for_save")
            await self._prune()
        finally:
            self.saving = None
        return agreed("save", infos)

    async def _prune(self) -> None:
        if self._keep is not None:
            await asyncio.to_thread(prune_checkpoints, self._folder, self._keep)
