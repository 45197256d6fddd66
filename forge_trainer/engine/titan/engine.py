"""TitanEngine: one rank of a TorchTitan model behind the `Engine` protocol.

A batch's path: token ids -> model (hidden states) -> lm_head (log-probs) -> loss (a sum) ->
backward (FSDP sums gradients over ranks) -> Updater (one division, clip, step).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from forge_trainer.config.trainer import TrainerConfig
from forge_trainer.errors import EngineError
from forge_trainer.functional.objective import needs_entropy
from forge_trainer.hf import read_hf_config, read_model_facts, resolve_device
from forge_trainer.protocols import (
    EngineFacts,
    EngineForwardBackward,
    MicrobatchOutput,
    WeightPiece,
)
from forge_trainer.types import (
    CheckpointInfo,
    LossFn,
    Normalize,
    OptimParams,
    OptimStepResult,
    SaveRequest,
    TrainBatch,
    World,
)

from ..checkpoint import load_checkpoint, on_first_rank, save_checkpoint
from ..export import HfWriter, copy_model_files
from ..loss_call import LossCalls
from ..update import Counts, Updater
from .attention import inner_attention_config
from .model import build_model_spec
from .parallel import build_model, build_parallel_dims, load_hf_weights
from .passes import ModelPass, PipelinePass, WholePass
from .platform import join_process_group, select_device
from .weights import full_hf_tensors, hf_pieces

CONSTANT_SCHEDULE_STEPS = 2**31
"""Length given to TorchTitan for a schedule without an end; it asserts past its last step."""


class TitanEngine:
    """Keeps the `Engine` protocol. Call `setup` first."""

    def __init__(self, config: TrainerConfig, model_dir: Path, world: World | None = None) -> None:
        self._config = config
        self._model_dir = model_dir
        self._world = world or World()

    def setup(self) -> None:
        """Join the process group, build and shard the model, load its weights."""
        config = self._config
        self._device = select_device(resolve_device(config.device), self._world)
        join_process_group(self._device, self._world, config.collective_timeout_s)
        facts = read_model_facts(self._model_dir)
        self._max_sequence_tokens = config.max_sequence_tokens or facts.max_sequence_tokens
        spec = build_model_spec(
            read_hf_config(self._model_dir),
            max_sequence_tokens=self._max_sequence_tokens,
            inner_attention=inner_attention_config(self._device),
        )
        self._parallel_dims = build_parallel_dims(config)
        pipeline = PipelinePass(num_stages=config.parallel.pipeline, stage=self._coordinate("pp"))
        self._built = build_model(
            spec, config, self._parallel_dims, self._device, pipeline.on_last_stage
        )
        self._model = self._built.part
        self._pass: ModelPass = WholePass(self._built)
        if self._built.schedule is not None:
            pipeline.connect(self._built)
            self._pass = pipeline
        assert spec.state_dict_adapter is not None
        self._adapter = spec.state_dict_adapter(spec.model, None)
        load_hf_weights(self._built, self._adapter, self._model_dir)
        self._build_optimizer()

    def _build_optimizer(self) -> None:
        optimizer, schedule = self._config.optimizer, self._config.lr_schedule
        adamw = default_adamw(
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        adamw.implementation = "fused" if self._device.type == "cuda" else "foreach"
        self._optimizers = adamw.build(model_parts=[self._model])
        total_steps = schedule.total_steps or CONSTANT_SCHEDULE_STEPS
        self._schedulers = LRSchedulersContainer.Config(
            warmup_steps=schedule.warmup_steps,
            decay_ratio=schedule.decay_steps / total_steps,
            decay_type=schedule.decay_type,
            min_lr_factor=schedule.min_lr_factor,
        ).build(optimizers=self._optimizers, training_steps=total_steps)
        self._updater = Updater(
            self._config,
            optimizers=list(self._optimizers),
            schedulers=list(self._schedulers),
            reduce_counts=self._reduce_counts,
            sum_over_ranks=self._sum_over_ranks,
            rank=self._world.rank,
        )

    @property
    def step(self) -> int:
        return self._updater.step

    @property
    def accumulated(self) -> tuple[int, int]:
        counts = self._updater.accumulated
        return counts.sequences, counts.tokens

    def facts(self) -> EngineFacts:
        facts = read_model_facts(self._model_dir)
        dp_rank = self._coordinate("batch")
        coordinates = {"dp": dp_rank, "tp": self._coordinate("tp"), "pp": self._coordinate("pp")}
        return EngineFacts(
            model_type=facts.model_type,
            vocab_size=facts.vocab_size,
            max_sequence_tokens=self._max_sequence_tokens,
            num_parameters=self._built.num_parameters,
            dp_rank=dp_rank,
            dp_size=self._config.dp_size,
            coordinates=coordinates,
            has_outputs=self._built.has_lm_head,
            device=str(self._device),
        )

    def _coordinate(self, axis: str) -> int:
        mesh = self._parallel_dims.get_optional_mesh(axis)
        return 0 if mesh is None else int(mesh.get_local_rank())

    @torch.no_grad()
    def forward(
        self, batches: Sequence[TrainBatch], *, with_entropy: bool = False
    ) -> list[MicrobatchOutput]:
        outputs = []
        for batch in (batch.to(self._device) for batch in batches):
            values = self._pass.forward(batch, with_entropy=with_entropy)
            if values is not None:
                logprobs_BT, entropies_BT = values
                entropies = None if entropies_BT is None else entropies_BT.cpu()
                outputs.append(MicrobatchOutput(logprobs_BT.cpu(), entropies))
        return outputs

    def forward_backward(
        self, batches: Sequence[TrainBatch], loss_fn: LossFn, *, return_logprobs: bool = False
    ) -> EngineForwardBackward:
        calls = LossCalls(loss_fn, batches)
        try:
            for batch in (batch.to(self._device) for batch in batches):
                self._pass.forward_backward(batch, calls, with_entropy=needs_entropy(loss_fn))
            failed_rank, cause = self._first_error(calls.error)
            if cause is not None:
                raise EngineError(
                    f"the loss failed: {cause}", rank=failed_rank, phase="forward_backward"
                )
            result = calls.result(return_logprobs=return_logprobs)
        except BaseException:
            # Half a gradient must not reach the next step.
            self.clear_gradients()
            raise
        self._updater.add(calls.counts)
        return result

    def optim_step(
        self, *, normalize: Normalize = "tokens", params: OptimParams | None = None
    ) -> OptimStepResult:
        return self._updater.optim_step(normalize=normalize, params=params)

    def clear_gradients(self) -> None:
        self._updater.clear()

    def save(self, request: SaveRequest) -> CheckpointInfo:
        write = self._write_hf if request.format == "hf" else self._dcp_writer(request)
        return save_checkpoint(request, self.step, write)

    def _dcp_writer(self, request: SaveRequest) -> Callable[[Path], None]:
        state = self._training_state(weights_only=request.weights_only)
        return lambda folder: dcp.save(state, checkpoint_id=folder)

    def _write_hf(self, folder: Path) -> None:
        """One rank of every pipeline stage writes that stage's tensors."""
        writer = HfWriter(folder, part=f"stage{self._coordinate('pp')}")
        tensors = full_hf_tensors(self._model, self._adapter)
        if self._coordinate("batch") == 0 and self._coordinate("tp") == 0:
            writer.add(tensors)
        else:
            deque(tensors, maxlen=0)
        on_first_rank(lambda: copy_model_files(self._model_dir, folder))
        writer.finish()

    def load(self, path: str, *, weights_only: bool = False) -> CheckpointInfo:
        state = self._training_state(weights_only=weights_only)
        info = load_checkpoint(state, Path(path), weights_only=weights_only)
        if not weights_only:
            self._optimizers.load_state_dict(state["optimizer"])
            self._schedulers.load_state_dict(state["lr_scheduler"])
            self._updater.step = info.step
        self._updater.clear()
        return info

    def weight_pieces(self, *, dtype: torch.dtype) -> Iterator[WeightPiece]:
        return hf_pieces(self._model, self._adapter, dtype=dtype)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _training_state(self, *, weights_only: bool = False) -> dict[str, Any]:
        """Everything a resumed run needs; its tensors are the live ones, filled in place."""
        if weights_only:
            return {"model": self._model.state_dict()}
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizers.state_dict(),
            "lr_scheduler": self._schedulers.state_dict(),
        }

    def _reduce_counts(self, counts: Counts) -> Counts:
        """Summed over data-parallel ranks only: other axes see the same tokens."""
        mesh = self._parallel_dims.get_optional_mesh("batch")
        if mesh is None:
            return counts
        total = torch.tensor([counts.sequences, counts.tokens], device=self._device)
        dist.all_reduce(total, group=mesh.get_group())
        sequences, tokens = total.tolist()
        return Counts(int(sequences), int(tokens))

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        dist.all_reduce(value)
        return value

    def _first_error(self, own: str | None) -> tuple[int, str | None]:
        """The lowest rank with an error and its text, the same on all ranks."""
        if self._world.size == 1:
            return self._world.rank, own
        flag = torch.tensor(int(own is not None), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not flag.item():
            return self._world.rank, None
        errors: list[str | None] = [None] * self._world.size
        dist.all_gather_object(errors, own)
        return next((rank, error) for rank, error in enumerate(errors) if error is not None)
