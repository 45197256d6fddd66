"""The slow obvious pass through a model: one document at a time, full logits, no packing."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from forge_trainer.types import TrainBatch

from .steps import Loss, Outputs, Wanted


class DocumentPass:
    """Keeps `ModelPass` for a causal LM of transformers."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        self._model = model
        self._dtype = dtype

    def forward(self, batch: TrainBatch, wanted: Wanted) -> Outputs:
        logprobs_BT, entropies_BT = self._token_logprobs(batch)
        return logprobs_BT, entropies_BT if wanted.entropies else None

    def forward_backward(
        self, batch: TrainBatch, loss: Loss, wanted: Wanted, *, is_last: bool
    ) -> None:
        logprobs_BT, entropies_BT = self._token_logprobs(batch)
        loss(logprobs_BT, entropies_BT, batch).backward()

    def abandon(self) -> None:
        """Nothing to drop: every gradient is where the updater clears it."""

    def _token_logprobs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        device = batch.token_ids_BT.device
        logprobs_BT = torch.zeros(batch.token_ids_BT.shape, dtype=self._dtype, device=device)
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
