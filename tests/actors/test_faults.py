"""Processes that die: who, in what, and nothing left behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from forge_trainer.config import WeightsConfig
from forge_trainer.controller.ranks import ask_all
from forge_trainer.errors import ConfigError, WorkerLostError
from forge_trainer.processes.handles import MeshRanks
from forge_trainer.processes.lifecycle import running_services
from forge_trainer.processes.patience import CallLimits, Patience
from forge_trainer.types import LossOutput, TrainBatch
from tests.actors.conftest import GENERATOR, TRAINER, running_cluster
from tests.actors.test_mesh import GatedLoss
from tests.data import random_sequences
from tests.processes import descendants
from tests.waiting import A_HANG_S, FileGate

GOOD = random_sequences(6)


def test_a_rank_killed_in_mid_step_is_named(tiny_qwen3: Path, tmp_path: Path) -> None:
    gate = FileGate(tmp_path)
    with running_cluster(tiny_qwen3, tmp_path / "checkpoints", TRAINER) as cluster:
        trainer = cluster.trainer
        facts = cluster.run(trainer.get_config())

        async def step_and_kill() -> None:
            step = asyncio.create_task(trainer.forward_backward(GOOD, loss=GatedLoss(gate)))
            await gate.reached()
            os.kill(facts.ranks[1].pid, signal.SIGKILL)
            gate.open()
            await step

        with pytest.raises(WorkerLostError, match="a trainer process is gone") as caught:
            cluster.run(step_and_kill())
        assert (caught.value.rank, caught.value.phase) == (1, "forward_backward")
        # Whatever is asked next is not even sent.
        not_sent = patch.object(MeshRanks, "_send", side_effect=AssertionError)
        with not_sent, pytest.raises(WorkerLostError):
            cluster.run(trainer.optim_step())


@dataclasses.dataclass(frozen=True)
class FullMemory:
    """A loss whose backward pass runs out of memory on the last rank, outside of what it checks."""

    def __call__(self, logprobs_BT: torch.Tensor, batch: TrainBatch) -> LossOutput:
        is_in_the_model = logprobs_BT.grad_fn is not None
        if is_in_the_model and dist.get_rank() == dist.get_world_size() - 1:
            logprobs_BT.register_hook(self._raise)
        return LossOutput(total=logprobs_BT.sum())

    def _raise(self, gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_memory_that_runs_out_on_one_rank_is_the_cause_and_the_others_do_not_wait_for_it(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    """They waited for the time-out of collectives, and their end was told as the cause."""
    # Only a rank that is let go ends before the test does.
    config = TRAINER.model_copy(update={"init_timeout_s": 10 * A_HANG_S})
    with running_cluster(tiny_qwen3, tmp_path, config) as cluster:
        with pytest.raises(WorkerLostError) as caught:
            cluster.run(cluster.trainer.forward_backward(GOOD, loss=FullMemory()))
        assert str(caught.value).startswith(
            "the mesh is lost: out of memory on rank 1 in forward_backward: CUDA out of memory. "
            "Tried to allocate 2.00 GiB.; make packing.max_row_tokens"
        )
        assert caught.value.rank == 1
        waiting, failed = cluster.run(ask_all(cluster.trainer._ranks, "status"))
        assert (waiting.phase, failed.phase) == ("idle", "idle")
        assert "peer" in waiting.last_error
        assert failed.last_error.startswith("out of memory on rank 1")


def test_a_generator_that_dies_is_named_and_the_trainer_goes_on(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = TRAINER.model_copy(update={"num_ranks": 1})
    with running_cluster(tiny_qwen3, tmp_path, config) as cluster:
        ref = cluster.run(cluster.trainer.push_weights())
        os.kill(cluster.run(cluster.generator.get_status()).pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="a generator process is gone"):
            cluster.run(cluster.generator.pull_weights(ref))
        assert cluster.run(cluster.trainer.train_step(GOOD, loss="grpo")).optim.step == 1
        assert cluster.run(cluster.trainer.push_weights()).version > ref.version


def test_a_port_in_use_is_a_config_error_before_anything_starts(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    before = descendants()
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        config = TRAINER.model_copy(update={"master_port": port})

        async def start() -> None:
            services = running_services(
                config,
                GENERATOR,
                WeightsConfig(),
                model_dir=tiny_qwen3,
                checkpoint_folder=tmp_path,
            )
            async with services:
                pass

        with pytest.raises(
            ConfigError, match=f"trainer.master_port: {port} cannot be had on this host"
        ):
            asyncio.run(start())
    assert descendants() == before


def test_a_start_that_fails_can_be_tried_again(tiny_qwen3: Path, tmp_path: Path) -> None:
    """The store of the first try stayed, and the second was told that one runs already."""
    broken = tmp_path / "broken"
    shutil.copytree(tiny_qwen3, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors")
    config = TRAINER.model_copy(update={"num_ranks": 1})
    failing = running_cluster(broken, tmp_path, config)
    with pytest.raises(ConfigError, match="missing tensors"):
        failing.__enter__()
    with running_cluster(tiny_qwen3, tmp_path, config) as cluster:
        assert cluster.run(cluster.trainer.push_weights()).num_tensors > 0


@pytest.mark.parametrize("method", ["train_step", "clear_gradients"])
def test_a_rank_that_hangs_is_lost_within_the_collective_timeout(
    tiny_qwen3: Path, tmp_path: Path, method: str
) -> None:
    """Also in a call without a collective, and closing does not wait for it again.

    What the limit is made of is in the config; that it is kept is seen by the test's end, since all
    others are days.
    """
    days = dict.fromkeys(("init_timeout_s", "stall_timeout_s"), 1e6)
    config = TRAINER.model_copy(update={"collective_timeout_s": 8.0, **days})
    with running_cluster(tiny_qwen3, tmp_path, config) as cluster:
        trainer = cluster.trainer
        # The first of its kind may compile for longer.
        cluster.run(trainer.train_step(GOOD, loss="grpo"))
        calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "train_step": lambda: trainer.train_step(GOOD, loss="grpo"),
            "clear_gradients": trainer.clear_gradients,
        }
        pid = cluster.run(trainer.get_config()).ranks[1].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerLostError) as caught:
                cluster.run(calls[method]())
            with patch.object(MeshRanks, "_send", side_effect=AssertionError):
                cluster.run(trainer.close())
        finally:
            os.kill(pid, signal.SIGCONT)
        phase = {"train_step": "forward_backward"}.get(method, method)
        assert (caught.value.rank, caught.value.phase) == (1, phase)


def test_a_hang_of_all_ranks_tells_what_each_was_doing(tiny_qwen3: Path, tmp_path: Path) -> None:
    """No rank answered, none of them broke a collective, and the call waited for ever."""
    gate = FileGate(tmp_path)
    granted = CallLimits.of

    def impatient(*args: Any) -> Patience:
        return dataclasses.replace(granted(*args), stall_s=20.0)

    with running_cluster(tiny_qwen3, tmp_path / "checkpoints", TRAINER) as cluster:
        trainer = cluster.trainer
        pid = cluster.run(trainer.get_config()).ranks[1].pid

        async def step_and_stop() -> None:
            step = asyncio.create_task(trainer.forward_backward(GOOD, loss=GatedLoss(gate)))
            await gate.reached()
            os.kill(pid, signal.SIGSTOP)
            await step

        try:
            with (
                patch.object(CallLimits, "of", impatient),
                pytest.raises(WorkerLostError, match="no rank made progress for") as caught,
            ):
                cluster.run(step_and_stop())
        finally:
            gate.open()
            os.kill(pid, signal.SIGCONT)
        assert "rank 0: forward_backward, microbatch 1 of " in str(caught.value)
        assert "rank 1: has not answered for " in str(caught.value)
        assert (caught.value.rank, caught.value.phase) == (1, "forward_backward")
