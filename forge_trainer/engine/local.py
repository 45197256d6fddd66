"""LocalEngine: any Hugging Face causal LM in plain PyTorch, one process.

The slow obvious version that other engines are compared with, also in float64: one document at
a time, full logits, no packing and no chunks. Also the quickest way to try an algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR

from forge_trainer.config import TrainerConfig
from forge_trainer.engine.checkpoint.checkpointer import Checkpointer
from forge_trainer.engine.checkpoint.export import HfWriter
from forge_trainer.engine.checkpoint.random_state import seed_everything
from forge_trainer.engine.checkpoint.together import RankGroup
from forge_trainer.functional.schedules import warmup_stable_decay
from forge_trainer.hf import (
    load_causal_lm,
    read_model_facts,
    resolve_device,
    unique_tensors,
)
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

from .documents import DocumentPass
from .loss_call import LossCalls
from .residence import Residence
from .steps import forward_all, forward_backward_all
from .update import Updater


class LocalEngine:
    """Keeps the `Engine` protocol. Call `setup` first."""

    def __init__(
        self,
        config: TrainerConfig,
        model_dir: Path,
        world: World | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.progress = Progress()
        self._config = config
        self._model_dir = model_dir
        self._dtype = dtype

    def setup(self) -> None:
        """Load the model and make the optimizer."""
        config = self._config
        self._device = resolve_device(config.device)
        self._model = load_causal_lm(self._model_dir, dtype=self._dtype, device=self._device)
        # transformers drops the gradient of the padding token's embedding. A document may hold that
        # token, and then it is one like any other.
        embeddings: Any = self._model.get_input_embeddings()
        embeddings.padding_idx = None
        self._pass = DocumentPass(self._model, self._dtype)
        self._checkpointer = Checkpointer(RankGroup(), self._device, layout=config.layout)
        seed_everything(config.seed)
        optimizers: list[torch.optim.Optimizer] = []
        schedulers: list[LambdaLR] = []
        if config.trainable:
            self._build_optimizer()
            optimizers, schedulers = [self._optimizer], [self._scheduler]
        else:
            self._model.requires_grad_(False)
        self._updater = Updater(
            config,
            optimizers=optimizers,
            schedulers=schedulers,
            reduce_counts=lambda counts: counts,
            sum_over_ranks=lambda value: value,
            rank=0,
        )
        self._residence = Residence(self._model, optimizers, self._device)
        self.eval_mode()

    def _build_optimizer(self) -> None:
        optimizer, schedule = self._config.optimizer, self._config.lr_schedule
        self._optimizer = getattr(torch.optim, optimizer.name)(
            self._model.parameters(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        factor = partial(
            warmup_stable_decay,
            warmup_steps=schedule.warmup_steps,
            decay_steps=schedule.decay_steps,
            total_steps=schedule.total_steps or 0,
            decay_type=schedule.decay_type,
            min_lr_factor=schedule.min_lr_factor,
        )
        self._scheduler = LambdaLR(self._optimizer, factor)

    @property
    def step(self) -> int:
        return self._updater.step

    @property
    def accumulated(self) -> tuple[int, int]:
        counts = self._updater.accumulated
        return counts.sequences, counts.tokens

    def facts(self) -> EngineFacts:
        facts = read_model_facts(self._model_dir)
        return EngineFacts(
            model_type=facts.model_type,
            vocab_size=facts.vocab_size,
            max_sequence_tokens=self._config.max_sequence_tokens or facts.max_sequence_tokens,
            num_parameters=sum(p.numel() for p in self._model.parameters()),
            dp_rank=0,
            dp_size=1,
            coordinates={"dp": 0, "tp": 0, "pp": 0},
            has_outputs=True,
            device=str(self._device),
        )

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
            LossCalls(loss_fn, batches, may_skip=self._config.on_non_finite == "skip"),
            progress=self.progress,
            device=self._device,
            first_error=lambda own: (0, own),
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
        if request.format == "hf":
            return self._checkpointer.export(request, self.step, self._write_hf)
        state = self._training_state(weights_only=request.weights_only)
        return self._checkpointer.save(request, self.step, state)

    def _write_hf(self, folder: Path) -> set[str]:
        writer = HfWriter(folder, part="stage0", group=RankGroup())
        writer.add(self._model.named_parameters())
        return writer.finish(self._model_dir)

    def wait_for_save(self) -> CheckpointInfo | None:
        return self._checkpointer.wait()

    def load(self, path: str, *, weights_only: bool = False) -> CheckpointInfo:
        state = self._training_state(weights_only=weights_only)
        info = self._checkpointer.load(Path(path), state, weights_only=weights_only)
        set_model_state_dict(self._model, state["model"])
        if not weights_only:
            set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"])
            self._scheduler.load_state_dict(state["lr_scheduler"])
            self._updater.load_state_dict(state["updater"])
        self._updater.clear()
        return info

    def weight_pieces(self, *, dtype: torch.dtype) -> Iterator[WeightPiece]:
        for name, (tensor, tied) in unique_tensors(self._model).items():
            published = dtype if isinstance(tensor, torch.nn.Parameter) else tensor.dtype
            shape = tuple(tensor.shape)
            yield WeightPiece(name, shape, (0,) * len(shape), tensor.detach(), published, tied)

    def to(self, device: str) -> None:
        self._residence.move(device)

    def train_mode(self) -> None:
        self._model.train()

    def eval_mode(self) -> None:
        self._model.eval()

    def bound_collectives(self, timeout_s: float) -> None:
        """There are none."""

    def abort(self) -> None:
        """Nobody waits for the only rank."""

    def close(self) -> None:
        """Wait for a running save."""
        self._checkpointer.close()

    def _training_state(self, *, weights_only: bool) -> dict[str, Any]:
        if weights_only:
            return {"model": get_model_state_dict(self._model)}
        self._updater.require_trainable()
        model_state, optimizer_state = get_state_dict(self._model, self._optimizer)
        return {
            "model": model_state,
            "optimizer": optimizer_state,
            "lr_scheduler": self._scheduler.state_dict(),
            "updater": self._updater.state_dict(),
        }
