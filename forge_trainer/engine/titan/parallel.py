"""From a model spec to a sharded model on this rank, with its weights loaded."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from forge_trainer.config.schema import TrainerConfig
from forge_trainer.errors import ConfigError
from forge_trainer.functional.logprobs import token_logprobs
from forge_trainer.hf import load_weights


def build_parallel_dims(config: TrainerConfig) -> ParallelDims:
    """TorchTitan's meshes for the configured layout; every group has the configured timeout."""
    dims = ParallelDims.from_config(_parallelism(config), config.num_ranks)
    dims.build_mesh()
    # New groups start with torch's 30 minutes. No rank may still be making one.
    dist.barrier()
    for mesh in dims.get_all_one_dimensional_meshes().values():
        dist.distributed_c10d._set_pg_timeout(
            timedelta(seconds=config.collective_timeout_s), mesh.get_group()
        )
    return dims


def build_model(
    spec: ModelSpec, config: TrainerConfig, parallel_dims: ParallelDims, device: torch.device
) -> Decoder:
    """The model, sharded on `device`; its parameters are not initialised yet."""
    parallelism = _parallelism(config)
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=TrainingConfig(
            dtype="float32",
            mixed_precision_param=config.compute_dtype,
            mixed_precision_reduce="float32",
        ),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no PREMUL_SUM; sums are what we want on every device.
            module.set_force_sum_reduction_for_comms(True)
    model.train()
    _replace_lm_head(model, config.logprob_chunk_tokens)
    return model


def load_hf_weights(model: Decoder, adapter: BaseStateDictAdapter, model_dir: Path) -> None:
    """Fill every parameter from the directory; each rank keeps its own shard.

    Raises:
        ConfigError: a tensor is missing, left over, or of another shape.
    """
    try:
        given = adapter.from_hf(load_weights(model_dir))
    except KeyError as error:
        raise ConfigError(f"{model_dir}: the model has no place for tensor {error}") from error
    wanted = model.state_dict()
    if model.enable_weight_tying:
        # One tensor under two names; filling one fills both.
        wanted.pop("tok_embeddings.weight", None)
        given.pop("tok_embeddings.weight", None)
    missing, left_over = wanted.keys() - given.keys(), given.keys() - wanted.keys()
    if missing or left_over:
        raise ConfigError(
            f"{model_dir}: missing tensors {sorted(missing)[:5]}, unknown tensors "
            f"{sorted(left_over)[:5]}"
        )
    with torch.no_grad():
        for name, parameter in wanted.items():
            if parameter.shape != given[name].shape:
                raise ConfigError(
                    f"{model_dir}: {name} has shape {tuple(given[name].shape)}, config.json "
                    f"asks for {tuple(parameter.shape)}"
                )
            _fill(parameter, given[name])


def _fill(parameter: Tensor, full: Tensor) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(full)
        return
    full = full.to(parameter.device, parameter.dtype)
    # Every rank has read the same file, so nothing needs to be sent.
    shard = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(shard.to_local())


def _replace_lm_head(model: Decoder, chunk_tokens: int) -> None:
    """Let the model end at hidden states, and its lm_head turn these into log-probs.

    Calling the module, not a function of its weight, keeps FSDP's hooks: they gather the weight
    before and reduce its gradient after.
    """
    model._skip_lm_head = True
    lm_head: Any = model.lm_head

    def forward(
        hidden_BTH: Tensor,
        token_ids_BT: Tensor,
        document_ids_BT: Tensor,
        temperatures_BT: Tensor,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        return token_logprobs(
            hidden_BTH,
            lm_head.weight,
            token_ids_BT,
            document_ids_BT,
            temperatures_BT,
            chunk_tokens=chunk_tokens,
            with_entropy=with_entropy,
        )

    replaced: Callable[..., Any] = forward
    lm_head.forward = replaced


def _parallelism(config: TrainerConfig) -> ParallelismConfig:
    layout = config.parallel
    return ParallelismConfig(
        data_parallel_replicate_degree=layout.data_replicate,
        data_parallel_shard_degree=-1,
        tensor_parallel_degree=layout.tensor,
        pipeline_parallel_degree=layout.pipeline,
        # With the default backend, FSDP2 on a released torch refuses plain parameters.
        spmd_backend="partial_dtensor",
    )
