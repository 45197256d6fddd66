"""Attention that keeps packed documents apart, on every device.

On a GPU this is TorchTitan's FlexAttention. Its backward does not exist on the CPU (torch 2.13),
so there the same causal-within-document mask is made dense, once per batch, for PyTorch's SDPA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.attention import FlexAttention


class MaskedSDPA(FlexAttention):
    """Inner attention over a dense mask [B, 1, T, T]; True means "may attend".

    A FlexAttention by type and argument names, since TorchTitan's sharding plans look at both.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return out.transpose(1, 2)


def inner_attention_config(device: torch.device) -> FlexAttention.Config:
    """The inner attention that works on `device`."""
    return MaskedSDPA.Config() if device.type == "cpu" else FlexAttention.Config()


def attention_masks(model: Any, positions_BT: Tensor) -> Any:
    """The mask of one batch, in the form the model's inner attention takes.

    A document starts where the position is 0.
    """
    if positions_BT.device.type == "cpu":
        return dense_document_mask(positions_BT)
    return model.get_attention_masks(positions_BT)


def dense_document_mask(positions_BT: Tensor) -> Tensor:
    """[B, 1, T, T] booleans: token q may see token k if k is not later and of the same document.

    Example: positions [0, 1, 0] -> rows [1 0 0], [1 1 0], [0 0 1]
    """
    documents_BT = torch.cumsum(positions_BT == 0, dim=1)
    same = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same.tril()[:, None]
