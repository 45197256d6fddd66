"""From a model spec to a sharded model on this rank, with its weights loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from forge_trainer.config import TrainerConfig
from forge_trainer.errors import ConfigError
from forge_trainer.functional.logprobs import LogprobOptions, VocabShard, token_logprobs
from forge_trainer.hf import load_weights

ACTIVATION_CHECKPOINTING = {
    "none": None,
    "selective": SelectiveAC.Config(),
    "full": FullAC.Config(),
}


def build_parallel_dims(config: TrainerConfig) -> ParallelDims:
    """TorchTitan's meshes for the configured layout."""
    dims = ParallelDims.from_config(_parallelism(config), config.num_ranks)
    dims.build_mesh()
    return dims


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """This rank's part of a model."""

    part: Decoder
    """The whole model, or this rank's pipeline stage of it."""
    names: frozenset[str]
    """Of all tensors of the whole model."""
    num_parameters: int
    """Of the whole model."""
    num_matmul_parameters: int
    """Of the whole model, without embeddings that are only looked up."""
    has_lm_head: bool
    schedule: Any
    """torch's pipeline schedule; None without pipeline parallelism."""


def build_model(
    spec: ModelSpec,
    config: TrainerConfig,
    parallel_dims: ParallelDims,
    device: torch.device,
    pipeline_loss: Callable[[Tensor, Tensor], Tensor],
) -> BuiltModel:
    """The model, sharded on `device`; its parameters are not initialised yet.

    `pipeline_loss` gets hidden states and row indices of the last stage's microbatches.
    """
    parallelism = _parallelism(config)
    if config.float8 != "none":
        # torchao is heavy, and an optional extra.
        from .float8 import convert_to_float8

        spec.model = convert_to_float8(spec.model, config)
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        model = spec.model.build()
    names = frozenset(model.state_dict())
    num_parameters = sum(p.numel() for p in model.parameters())
    looked_up = 0 if model.enable_weight_tying else model.tok_embeddings.weight.numel()
    options: dict[str, Any] = {
        "parallel_dims": parallel_dims,
        "training": TrainingConfig(
            dtype="float32",
            mixed_precision_param=config.compute_dtype,
            mixed_precision_reduce="float32",
            local_batch_size=config.parallel.num_pipeline_microbatches,
        ),
        "parallelism": parallelism,
        "compile_config": CompileConfig(enable="model" in config.compile, components=["model"]),
        "ac_config": ACTIVATION_CHECKPOINTING[config.activation_checkpointing],
        "dump_folder": "",
    }
    schedule, is_last = None, True
    if config.parallel.pipeline > 1:
        schedule, (model,), _, is_last = spec.pipelining_fn(
            model,
            **options,
            device=device,
            model_config=spec.model,
            parallelize_fn=spec.parallelize_fn,
            loss_fn=lambda hidden, rows: (pipeline_loss(hidden, rows), {}),
        )
    else:
        model = spec.parallelize_fn(model, **options)
    _materialise(model, device)
    if is_last:
        _replace_lm_head(model, config.logprob_chunk_tokens)
    return BuiltModel(model, names, num_parameters, num_parameters - looked_up, is_last, schedule)


def _materialise(model: Decoder, device: torch.device) -> None:
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no PREMUL_SUM; sums are what we want on every device.
            module.set_force_sum_reduction_for_comms(True)
    model.train()


def load_hf_weights(built: BuiltModel, adapter: BaseStateDictAdapter, model_dir: Path) -> None:
    """Fill every parameter from the directory; each rank keeps its own shard.

    Raises:
        ConfigError: a tensor is missing, left over, or of another shape.
    """
    try:
        given = adapter.from_hf(load_weights(model_dir))
    except KeyError as error:
        raise ConfigError(f"{model_dir}: the model has no place for tensor {error}") from error
    tied = {"tok_embeddings.weight"} if built.part.enable_weight_tying else set()
    missing = built.names - tied - given.keys()
    left_over = given.keys() - built.names
    if missing or left_over:
        raise ConfigError(
            f"{model_dir}: missing tensors {sorted(missing)[:5]}, unknown tensors "
            f"{sorted(left_over)[:5]}"
        )
    with torch.no_grad():
        for name, parameter in built.part.state_dict().items():
            if name in tied:
                # One tensor under two names; filling one fills both.
                continue
            if parameter.shape != given[name].shape:
                raise ConfigError(
                    f"{model_dir}: {name} has shape {tuple(given[name].shape)}, config.json "
                    f"asks for {tuple(parameter.shape)}"
                )
            _fill(parameter, given[name])


def _fill(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's rectangle; every rank has read the same file, so nothing is sent."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    shape, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    own = tuple(slice(o, o + n) for o, n in zip(offsets, shape, strict=True))
    parameter.to_local().copy_(full[own])


def _replace_lm_head(model: Decoder, chunk_tokens: int) -> None:
    """Let the model end at hidden states, and its lm_head turn these into log-probs.

    Calling the module, not a function of its weight, keeps FSDP's hooks: they gather the weight
    before and reduce its gradient after. Under tensor parallelism the weight is this rank's part
    of the vocabulary, and hidden states are the same on all ranks of the axis.
    """
    model._skip_lm_head = True
    lm_head: Any = model.lm_head

    def forward(
        hidden_BTH: Tensor,
        token_ids_BT: Tensor,
        document_ids_BT: Tensor,
        temperatures_BT: Tensor,
        with_entropy: bool,
        wanted_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        weight, shard = lm_head.weight, None
        if isinstance(weight, DTensor):
            shard = _vocab_shard(weight)
            weight = weight.to_local()
        if isinstance(hidden_BTH, DTensor):
            # Each vocabulary shard gives its part of the hidden states' gradient.
            hidden_BTH = hidden_BTH.to_local(grad_placements=[Partial()])
        return token_logprobs(
            hidden_BTH,
            weight,
            token_ids_BT,
            document_ids_BT,
            temperatures_BT,
            LogprobOptions(chunk_tokens, with_entropy, shard),
            wanted_BT=wanted_BT,
        )

    replaced: Callable[..., Any] = forward
    lm_head.forward = replaced


def _vocab_shard(weight: DTensor) -> VocabShard:
    _, (start, _) = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    return VocabShard(start=start, group=weight.device_mesh.get_group())


def _parallelism(config: TrainerConfig) -> ParallelismConfig:
    layout = config.parallel
    return ParallelismConfig(
        data_parallel_replicate_degree=layout.data_replicate,
        data_parallel_shard_degree=-1,
        tensor_parallel_degree=layout.tensor,
        pipeline_parallel_degree=layout.pipeline,
        context_parallel_degree=layout.context,
        expert_parallel_degree=layout.expert,
        pipeline_parallel_schedule="1F1B",
        pipeline_parallel_microbatch_size=1,
        # With the default backend, FSDP2 on a released torch refuses plain parameters.
        spmd_backend="partial_dtensor",
    )
