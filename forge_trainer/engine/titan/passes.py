"""How a microbatch goes through the model: at once, or stage by stage.

Both give log-probs where the model ends; ranks of earlier pipeline stages get none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from forge_trainer.types import TrainBatch

from ..steps import Loss, Outputs, Wanted
from .attention import attention_masks
from .parallel import BuiltModel


class WholePass:
    """The model on one rank, or sharded in ways that its forward hides.

    With `defers_reduction`, gradients stay whole on every rank until a call's last microbatch.
    """

    def __init__(self, built: BuiltModel, *, defers_reduction: bool = False) -> None:
        self._model = built.part
        self._defers_reduction = defers_reduction

    def forward(self, batch: TrainBatch, wanted: Wanted) -> Outputs | None:
        outputs = self._outputs(batch, wanted)
        release_gathered(self._model)
        return outputs

    def forward_backward(
        self, batch: TrainBatch, loss: Loss, wanted: Wanted, *, is_last: bool
    ) -> None:
        if self._defers_reduction:
            self._model.set_requires_gradient_sync(is_last)
        logprobs_BT, entropies_BT = self._outputs(batch, wanted)
        loss(logprobs_BT, entropies_BT, batch).backward()

    def abandon(self) -> None:
        release_gathered(self._model)
        for module in self._model.modules() if self._defers_reduction else ():
            if isinstance(module, FSDPModule):
                # torch 2.13.0 has no public way to drop what has not been reduced.
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    for parameter in group.fsdp_params:
                        parameter.unsharded_accumulated_grad = None
                        if hasattr(parameter, "_unsharded_param"):
                            parameter.unsharded_param.grad = None

    def _outputs(self, batch: TrainBatch, wanted: Wanted) -> Outputs:
        hidden_BTH = self._model(
            batch.token_ids_BT,
            positions=batch.positions_BT,
            attention_masks=attention_masks(self._model, batch.positions_BT),
        )
        return apply_lm_head(self._model, hidden_BTH, batch, wanted)


class PipelinePass:
    """One stage of the model per rank of the axis. Rows of a batch are the schedule's microbatches.

    The schedule hands hidden states and row indices to `on_last_stage`, which looks up the rest.
    """

    def __init__(self, *, num_stages: int, stage: int) -> None:
        self._is_first, self._is_last = stage == 0, stage == num_stages - 1
        self._shape: torch.Size | None = None
        self._is_measuring = False

    def connect(self, built: BuiltModel) -> None:
        """Must come before the first pass; the model is built with `on_last_stage`."""
        self._model, self._schedule = built.part, built.schedule
        initialize = self._schedule._initialize_stage

        def measure(*args: Any, **kwargs: Any) -> None:
            self._is_measuring = True
            accumulated = [(p, p.grad) for p in built.part.parameters()]
            try:
                initialize(*args, **kwargs)
            finally:
                self._is_measuring = False
                for parameter, grad in accumulated:
                    parameter.grad = grad

        # torch 2.13.0: before the first microbatch of a shape, stages run once to learn what they
        # exchange, the loss included, and then drop all gradients. That run must not count, and
        # what earlier calls have accumulated must stay.
        self._schedule._initialize_stage = measure

    def on_last_stage(self, hidden_BTH: Tensor, rows_B: Tensor) -> Tensor:
        """The loss of some rows of the batch; their outputs are kept."""
        if self._is_measuring:
            return hidden_BTH.sum()
        batch = self._batch.select_rows(rows_B)
        outputs = apply_lm_head(self._model, hidden_BTH, batch, self._wanted)
        self._outputs.append(outputs)
        if self._loss is None:
            return outputs[0].sum()
        return self._loss(*outputs, batch)

    def forward(self, batch: TrainBatch, wanted: Wanted) -> Outputs | None:
        self._run(self._schedule.eval, batch, None, wanted)
        release_gathered(self._model)
        if not self._is_last:
            return None
        logprobs, entropies = zip(*self._outputs, strict=True)
        return torch.cat(logprobs), torch.cat(entropies) if wanted.entropies else None

    def forward_backward(
        self, batch: TrainBatch, loss: Loss, wanted: Wanted, *, is_last: bool
    ) -> None:
        self._run(self._schedule.step, batch, loss, wanted)

    def abandon(self) -> None:
        release_gathered(self._model)

    def _run(
        self, run: Callable[..., Any], batch: TrainBatch, loss: Loss | None, wanted: Wanted
    ) -> None:
        self._batch, self._loss, self._wanted = batch, loss, wanted
        self._outputs: list[Outputs] = []
        if batch.token_ids_BT.shape != self._shape:
            # torch 2.13.0: stages keep the shapes of their first call.
            self._schedule._stage_forward_initialized = False
            self._schedule._stage_backward_initialized = False
            self._shape = batch.token_ids_BT.shape
        rows_B = torch.arange(len(batch.token_ids_BT), device=batch.token_ids_BT.device)
        run(
            *((batch.token_ids_BT,) if self._is_first else ()),
            positions=batch.positions_BT,
            attention_masks=attention_masks(self._model, batch.positions_BT),
            target=rows_B if self._is_last else None,
            losses=[] if self._is_last else None,
            return_outputs=False,
        )


def release_gathered(model: Any) -> None:
    """Let every rank keep its own shards only.

    torch 2.13.0 gathers embeddings, norm and lm_head together and releases them in the backward
    pass. Without one they would stay, and the next pass would not see an update made since.
    """
    if isinstance(model, FSDPModule):
        model.reset_iter_state()


def apply_lm_head(model: Any, hidden_BTH: Tensor, batch: TrainBatch, wanted: Wanted) -> Outputs:
    """Log-probs and entropies from hidden states, see `parallel._replace_lm_head`."""
    outputs: Outputs = model.lm_head(
        hidden_BTH,
        batch.token_ids_BT,
        batch.document_ids_BT,
        batch.temperatures_BT,
        wanted.entropies,
        batch.loss_mask_BT if wanted.targets_only else None,
    )
    return outputs
