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
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR

from forge_trainer.config.trainer import TrainerConfig
from forge_trainer.errors import EngineError
from forge_trainer.functional.schedules import warmup_stable_decay
from forge_trainer.hf import load_causal_lm, read_model_facts, resolve_device
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
)

from .checkpoint import load_checkpoint, save_checkpoint
from .export import HfWriter, copy_model_files
from .loss_call import LossCalls
from .update import Updater


class LocalEngine:
    """Keeps the `Engine` protocol. Call `setup` first."""

    def __init__(
        self, config: TrainerConfig, model_dir: Path, *, dtype: torch.dtype = torch.float32
    ) -> None:
        self._config = config
        self._model_dir = model_dir
        self._dtype = dtype

    def setup(self) -> None:
        """Load the model and make the optimizer."""
        self._device = resolve_device(self._config.device)
        self._model = load_causal_lm(self._model_dir, dtype=self._dtype, device=self._device)
        # transformers drops the gradient of the padding token's embedding. A document may hold that
        # token, and then it is one like any other.
        embeddings: Any = self._model.get_input_embeddings()
        embeddings.padding_idx = None
        optimizer = self._config.optimizer
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        schedule = self._config.lr_schedule
        factor = partial(
            warmup_stable_decay,
            warmup_steps=schedule.warmup_steps,
            decay_steps=schedule.decay_steps,
            total_steps=schedule.total_steps or 0,
            decay_type=schedule.decay_type,
            min_lr_factor=schedule.min_lr_factor,
        )
        self._scheduler = LambdaLR(self._optimizer, factor)
        self._updater = Updater(
            self._config,
            optimizers=[self._optimizer],
            schedulers=[self._scheduler],
            reduce_counts=lambda counts: counts,
            sum_over_ranks=lambda value: value,
            rank=0,
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

    @torch.no_grad()
    def forward(
        self, batches: Sequence[TrainBatch], *, with_entropy: bool = False
    ) -> list[MicrobatchOutput]:
        outputs = []
        for batch in batches:
            logprobs_BT, entropies_BT = self._token_logprobs(batch.to(self._device))
            entropies = entropies_BT.float().cpu() if with_entropy else None
            outputs.append(MicrobatchOutput(logprobs_BT.float().cpu(), entropies))
        return outputs

    def forward_backward(
        self, batches: Sequence[TrainBatch], loss_fn: LossFn, *, return_logprobs: bool = False
    ) -> EngineForwardBackward:
        calls = LossCalls(loss_fn, batches)
        try:
            for batch in (batch.to(self._device) for batch in batches):
                logprobs_BT, entropies_BT = self._token_logprobs(batch)
                calls(logprobs_BT, entropies_BT, batch).backward()
            if calls.error is not None:
                raise EngineError(
                    f"the loss failed: {calls.error}", rank=0, phase="forward_backward"
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
        return save_checkpoint(request, self.step, partial(self._write, request))

    def _write(self, request: SaveRequest, folder: Path) -> None:
        if request.format == "hf":
            writer = HfWriter(folder, part="stage0")
            writer.add(self._model.named_parameters())
            copy_model_files(self._model_dir, folder)
            writer.finish()
        else:
            state = self._training_state(weights_only=request.weights_only)
            dcp.save(state, checkpoint_id=folder)

    def load(self, path: str, *, weights_only: bool = False) -> CheckpointInfo:
        state = self._training_state(weights_only=weights_only)
        info = load_checkpoint(state, Path(path), weights_only=weights_only)
        set_model_state_dict(self._model, state["model"])
        if not weights_only:
            set_optimizer_state_dict(self._model, self._optimizer, state["optimizer"])
            self._scheduler.load_state_dict(state["lr_scheduler"])
            self._updater.step = info.step
        self._updater.clear()
        return info

    def weight_pieces(self, *, dtype: torch.dtype) -> Iterator[WeightPiece]:
        # named_parameters yields a tied tensor once, under its first name.
        for name, parameter in self._model.named_parameters():
            data = parameter.detach().to("cpu", dtype, copy=True).contiguous()
            yield WeightPiece(name, tuple(data.shape), (0,) * data.dim(), data)

    def close(self) -> None:
        """Nothing to free: the process owns everything."""

    def _training_state(self, *, weights_only: bool = False) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(self._model, self._optimizer)
        if weights_only:
            return {"model": model_state}
        return {
            "model": model_state,
            "optimizer": optimizer_state,
            "lr_scheduler": self._scheduler.state_dict(),
        }

    def _token_logprobs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of every token, document by document from full logits."""
        logprobs_BT = torch.zeros(batch.token_ids_BT.shape, dtype=self._dtype, device=self._device)
        entropies_BT = torch.zeros_like(logprobs_BT)
        for row, start, end in _documents(batch.document_ids_BT):
            ids = batch.token_ids_BT[row, start:end]
            logits = self._model(ids[None]).logits[0, :-1]
            scaled = logits / batch.temperatures_BT[row, start + 1 : end, None].to(self._dtype)
            log_p = torch.log_softmax(scaled, dim=-1)
            logprobs_BT[row, start + 1 : end] = log_p.gather(-1, ids[1:, None]).squeeze(-1)
            entropies_BT[row, start + 1 : end] = -(log_p.exp() * log_p).sum(-1)
        # A row of padding has no document; the sum stays connected to the parameters.
        if not logprobs_BT.requires_grad and torch.is_grad_enabled():
            logprobs_BT = logprobs_BT + 0.0 * next(self._model.parameters()).sum()
        return logprobs_BT, entropies_BT


def _documents(document_ids_BT: Tensor) -> Iterator[tuple[int, int, int]]:
    """(row, start, end) of every document."""
    for row, ids in enumerate(document_ids_BT.tolist()):
        start = 0
        for t in range(1, len(ids) + 1):
            if t == len(ids) or ids[t] != ids[start]:
                if ids[start] >= 0:
                    yield row, start, t
                start = t
