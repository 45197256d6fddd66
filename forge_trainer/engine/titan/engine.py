"""TitanEngine: one rank of a TorchTitan model behind the `Engine` protocol.

A batch's path: token ids -> model (hidden states) -> lm_head (log-probs) -> loss (a sum) ->
backward (FSDP sums gradients over ranks) -> Updater (one division, clip, step).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from forge_trainer.config import TrainerConfig
from forge_trainer.engine.checkpoint.checkpointer import Checkpointer
from forge_trainer.engine.checkpoint.export import HfWriter
from forge_trainer.engine.checkpoint.random_state import seed_everything
from forge_trainer.engine.checkpoint.together import RankGroup
from forge_trainer.functional.estimates.flops import device_peak_flops
from forge_trainer.hf import read_hf_config, read_model_facts, resolve_device
from forge_trainer.pieces import WeightPiece
from forge_trainer.status import EngineFacts, Progress
from forge_trainer.types import (
    CheckpointInfo,
    EngineForwardBackward,
    LossFn,
    MicrobatchOutput,
    Normalize,
    OptimParams,
    OptimStepResult,
    SaveRequest,
    TrainBatch,
    World,
)

from ..loss_call import LossCalls
from ..residence import Residence
from ..steps import ModelPass, forward_all, forward_backward_all
from ..update import Updater
from .attention import inner_attention_config
from .collectives import Collectives
from .model import build_model_spec
from .optimizer import build_optimizers, build_schedulers
from .parallel import build_model, build_parallel_dims, load_hf_weights
from .passes import PipelinePass, WholePass
from .platform import join_process_group, leave_process_group, select_device
from .weights import full_hf_tensors, hf_pieces


class TitanEngine:
    """Keeps the `Engine` protocol. Call `setup` first."""

    def __init__(self, config: TrainerConfig, model_dir: Path, world: World | None = None) -> None:
        self.progress = Progress()
        self._config = config
        self._model_dir = model_dir
        self._world = world or World()

    def setup(self) -> None:
        """Join the process group, build and shard the model, load its weights."""
        config = self._config
        self._device = select_device(resolve_device(config.device), self._world)
        # Ranks may be far apart until all are there: imports and first compilations take a while.
        self._must_leave = join_process_group(
            self._device, self._world, config.checkpoint_timeout_s
        )
        parallel_dims = build_parallel_dims(config)
        self._collectives = Collectives(parallel_dims, self._device, self._world)
        self._group = RankGroup.of_all_ranks(config.checkpoint_timeout_s)
        self._checkpointer = Checkpointer(self._group, self._device, layout=config.layout)
        self._build_model(parallel_dims)
        # Ranks that see the same tokens draw the same numbers.
        seed_everything(config.seed + self._collectives.coordinate("batch"))
        self._build_updater()
        self.eval_mode()
        # No rank may still be making a group, or loading what others have loaded.
        dist.barrier()
        self.bound_collectives(config.init_timeout_s - config.grace_s)

    def _build_model(self, parallel_dims: ParallelDims) -> None:
        config = self._config
        facts = read_model_facts(self._model_dir)
        self._max_sequence_tokens = config.max_sequence_tokens or facts.max_sequence_tokens
        spec = build_model_spec(
            read_hf_config(self._model_dir),
            max_sequence_tokens=self._max_sequence_tokens,
            inner_attention=inner_attention_config(self._device),
        )
        pipeline = PipelinePass(
            num_stages=config.parallel.pipeline, stage=self._collectives.coordinate("pp")
        )
        self._built = build_model(spec, config, parallel_dims, self._device, pipeline.on_last_stage)
        self._model = self._built.part
        self._pass: ModelPass = WholePass(
            self._built, defers_reduction=config.defer_gradient_reduction
        )
        if self._built.schedule is not None:
            pipeline.connect(self._built)
            self._pass = pipeline
        assert spec.state_dict_adapter is not None
        self._adapter = spec.state_dict_adapter(spec.model, None)
        load_hf_weights(self._built, self._adapter, self._model_dir)

    def _build_updater(self) -> None:
        config = self._config
        optimizers, schedulers = [], []
        if config.trainable:
            self._optimizers = build_optimizers(
                self._model, config.optimizer, self._device, all_names=self._built.names
            )
            self._schedulers = build_schedulers(self._optimizers, config.lr_schedule)
            optimizers, schedulers = list(self._optimizers), list(self._schedulers)
        else:
            self._model.requires_grad_(False)
        self._updater = Updater(
            config,
            optimizers=optimizers,
            schedulers=schedulers,
            reduce_counts=self._collectives.reduce_counts,
            sum_over_ranks=self._collectives.sum_over_ranks,
            rank=self._world.rank,
        )
        self._residence = Residence(self._model, optimizers, self._device)

    @property
    def step(self) -> int:
        return self._updater.step

    @property
    def accumulated(self) -> tuple[int, int]:
        counts = self._updater.accumulated
        return counts.sequences, counts.tokens

    def facts(self) -> EngineFacts:
        facts = read_model_facts(self._model_dir)
        coordinate = self._collectives.coordinate
        dp_rank = coordinate("batch")
        return EngineFacts(
            model_type=facts.model_type,
            vocab_size=facts.vocab_size,
            max_sequence_tokens=self._max_sequence_tokens,
            num_parameters=self._built.num_parameters,
            dp_rank=dp_rank,
            dp_size=self._config.dp_size,
            coordinates={"dp": dp_rank, "tp": coordinate("tp"), "pp": coordinate("pp")},
            has_outputs=self._built.has_lm_head,
            device=str(self._device),
            num_matmul_parameters=self._built.num_matmul_parameters,
            num_layers=facts.num_layers,
            attention_width=facts.attention_width,
            peak_flops=self._peak_flops(),
        )

    def _peak_flops(self) -> float | None:
        if self._device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self._device)
        return device_peak_flops(name, self._config.compute_dtype)

    def forward(
        self, batches: Sequence[TrainBatch], *, with_entropy: bool = False
    ) -> list[MicrobatchOutput]:
        self._residence.require_home()
        return forward_all(
            self._pass,
            batches,
            self.progress,
            device=self._device,
            with_entropy=with_entropy,
        )

    def forward_backward(
        self, batches: Sequence[TrainBatch], loss_fn: LossFn, *, return_logprobs: bool = False
    ) -> EngineForwardBackward:
        self._residence.require_home()
        return forward_backward_all(
            self._pass,
            self._updater,
            LossCalls(
                loss_fn,
                batches,
                compiles="loss" in self._config.compile,
                may_skip=self._config.on_non_finite == "skip",
            ),
            progress=self.progress,
            device=self._device,
            first_error=self._collectives.first_error,
            return_logprobs=return_logprobs,
        )

    def optim_step(
        self, *, normalize: Normalize = "tokens", params: OptimParams | None = None
    ) -> OptimStepResult:
        self._residence.require_home()
        return self._updater.optim_step(normalize=normalize, params=params)

    def clear_gradients(self) -> None:
        self._updater.clear()

    def save(self, request: SaveRequest) -> CheckpointInfo:
        self._residence.require_home()
        if request.format == "hf":
            return self._checkpointer.export(request, self.step, self._write_hf)
        state = self._training_state(weights_only=request.weights_only)
        return self._checkpointer.save(request, self.step, state)

    def wait_for_save(self) -> CheckpointInfo | None:
        return self._checkpointer.wait()

    def _write_hf(self, folder: Path) -> set[str]:
        """One rank of every pipeline stage writes that stage's tensors; its files."""
        coordinate = self._collectives.coordinate
        writes = coordinate("batch") == 0 and coordinate("tp") == 0
        part = f"stage{coordinate('pp')}"
        writer = HfWriter(folder, part=part, group=self._group, writes=writes)
        writer.add(full_hf_tensors(self._model, self._adapter))
        return writer.finish(self._model_dir)

    def load(self, path: str, *, weights_only: bool = False) -> CheckpointInfo:
        self._residence.require_home()
        state = self._training_state(weights_only=weights_only)
        info = self._checkpointer.load(Path(path), state, weights_only=weights_only)
        if not weights_only:
            self._optimizers.load_state_dict(state["optimizer"])
            self._schedulers.load_state_dict(state["lr_scheduler"])
            self._updater.load_state_dict(state["updater"])
        self._updater.clear()
        return info

    def weight_pieces(self, *, dtype: torch.dtype) -> Iterator[WeightPiece]:
        self._residence.require_home()
        return hf_pieces(self._model, self._adapter, dtype=dtype)

    def to(self, device: str) -> None:
        self._residence.move(device)

    def train_mode(self) -> None:
        self._model.train()

    def eval_mode(self) -> None:
        self._model.eval()

    def bound_collectives(self, timeout_s: float) -> None:
        self._collectives.bound(timeout_s)

    def abort(self) -> None:
        """End all process groups, so that ranks that wait in them fail at once."""
        self._collectives.abort()
        # FSDP holds groups, too, and gloo ends a connection once nobody does.
        for name in vars(self).keys() - {"progress", "_config", "_model_dir", "_world"}:
            delattr(self, name)
        gc.collect()

    def close(self) -> None:
        """Wait for a running save and leave the process group."""
        self._checkpointer.close()
        if self._must_leave:
            self._must_leave = False
            leave_process_group()

    def _training_state(self, *, weights_only: bool) -> dict[str, Any]:
        """What a resumed run needs; its tensors are the live ones, filled in place."""
        if weights_only:
            return {"model": self._model.state_dict()}
        self._updater.require_trainable()
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizers.state_dict(),
            "lr_scheduler": self._schedulers.state_dict(),
            "updater": self._updater.state_dict(),
        }
