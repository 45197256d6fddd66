"""The sharded state dict in Hugging Face form: this rank's rectangle of every tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from forge_trainer.functional.pieces.rectangles import rectangle_offsets
from forge_trainer.pieces import WeightPiece

TIED = {"model.embed_tokens.weight": ("lm_head.weight",)}
"""Hugging Face's names of tied embeddings: the one they are published under, and the other."""


def hf_pieces(
    model: Decoder, adapter: BaseStateDictAdapter, *, dtype: torch.dtype
) -> Iterator[WeightPiece]:
    """What this rank alone is responsible for; views of the model where it needs no reshaping.

    A tensor replicated over an axis comes from that axis's first rank; an empty shard from none.
    """
    parameters = {_plain(name) for name, _ in model.named_parameters()}
    tied = TIED if getattr(model.config, "enable_weight_tying", False) else {}
    for name, value in model.state_dict().items():
        target_dtype = dtype if name in parameters else value.dtype
        for hf_name, hf_value in adapter.to_hf({name: _splittable(model, name, value)}).items():
            rectangle = _own_rectangle(hf_name, hf_value)
            if rectangle is not None:
                offsets, data = rectangle
                shape = tuple(hf_value.shape)
                yield WeightPiece(
                    hf_name, shape, offsets, data, target_dtype, tied.get(hf_name, ())
                )


def _plain(name: str) -> str:
    """The name as state_dict has it: without the wrappers of checkpointing and compilation."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def full_hf_tensors(model: Decoder, adapter: BaseStateDictAdapter) -> Iterator[tuple[str, Tensor]]:
    """This stage's whole tensors under Hugging Face names, one at a time: a collective.

    A tied tensor comes once.
    """
    for name, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        yield from adapter.to_hf({name: full}).items()


def _splittable(model: Decoder, name: str, value: Tensor) -> Tensor:
    """The tensor in a layout that the adapter can reshape by heads.

    Llama's adapter permutes q and k head by head, which DTensor refuses where a shard boundary
    runs through a head; such a tensor is gathered first. A collective: same order on all ranks.
    """
    if not isinstance(model, Llama3Model) or not isinstance(value, DTensor):
        return value
    attention = model.config.layers[0].attention
    heads = {"wq.weight": attention.n_heads, "wk.weight": attention.n_kv_heads or attention.n_heads}
    for suffix, num_heads in heads.items():
        if name.endswith(suffix) and num_heads % value.device_mesh.size():
            return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return value


def _own_rectangle(name: str, value: Tensor) -> tuple[tuple[int, ...], Tensor] | None:
    """Offsets and data; None if another rank is responsible, or there is nothing."""
    if not isinstance(value, DTensor):
        return (0,) * value.dim(), value.detach()
    mesh, placements = value.device_mesh, value.placements
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    for coordinate, placement in zip(coordinates, placements, strict=True):
        if isinstance(placement, Replicate) and coordinate != 0:
            return None
    local = value.to_local().detach()
    if local.numel() == 0:
        return None
    return rectangle_offsets(name, value), local
