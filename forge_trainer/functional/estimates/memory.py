"""How many bytes a process needs for what is known before it starts.

Activations are not among it: they depend on what the compiler and activation checkpointing make of
a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge_trainer.config import GeneratorConfig, TrainerConfig, WeightsConfig

WIDTH = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a model decides how much room it takes."""

    num_parameters: int
    vocab_size: int
    num_layers: int
    head_dim: int
    max_sequence_tokens: int


def trainer_memory(model: ModelSize, config: TrainerConfig) -> dict[str, int]:
    """Bytes on the device of one rank, by what they are for."""
    layout = config.parallel
    model_parts = layout.tensor * layout.pipeline
    shards = config.num_ranks // layout.data_replicate
    parameters = 4 * model.num_parameters
    whole = parameters // model_parts
    needed = {"weights": parameters // shards, "rope": _rope(model, config)}
    if shards > model_parts:
        # FSDP gathers the layer that is computed, and the next one; a stage has whole layers.
        layers = 2 * WIDTH[config.compute_dtype] * model.num_parameters // layout.tensor
        needed["gathered layers"] = layers // model.num_layers
    # The numbers, their exponentials and their gradients, in float32.
    chunk = min(config.logprob_chunk_tokens, _tokens_per_microbatch(config))
    needed["logits chunk"] = 3 * 4 * chunk * model.vocab_size // layout.tensor
    if config.trainable:
        needed["gradients"] = whole if config.defer_gradient_reduction else parameters // shards
        # Both moments of Adam.
        needed["optimizer"] = 2 * parameters // shards
    return needed


def generator_memory(
    model: ModelSize, config: GeneratorConfig, weights: WeightsConfig, *, rows: int
) -> dict[str, int]:
    """Bytes on each device of one generator, by what they are for; its cache comes on top.

    `rows` are the completions that all of them are asked for at once.
    """
    slots = min(config.batch_size, -(-rows // config.replicas))
    return {
        "weights": WIDTH[config.dtype or weights.dtype]
        * model.num_parameters
        // config.tensor_parallel,
        # Those of one step, and a fifth of them to sample with.
        "logits": 6 * 4 * slots * model.vocab_size // 5,
    }


def staging_memory(model: ModelSize, config: TrainerConfig, weights: WeightsConfig) -> int:
    """Bytes of the host that one rank needs while it publishes."""
    shards = config.num_ranks // config.parallel.data_replicate
    return WIDTH[weights.dtype] * model.num_parameters // shards


def published_memory(model: ModelSize, weights: WeightsConfig) -> int:
    """Bytes of all versions that stay, and the one on its way: in the folder of shared memory, or
    in torchstore's volumes, which share them."""
    return (weights.keep_versions + 1) * WIDTH[weights.dtype] * model.num_parameters


def _rope(model: ModelSize, config: TrainerConfig) -> int:
    """TorchTitan keeps sine and cosine in float32 in every layer."""
    longest = config.max_sequence_tokens or model.max_sequence_tokens
    layers = -(-model.num_layers // config.parallel.pipeline)
    return layers * longest * 2 * model.head_dim * 4


def _tokens_per_microbatch(config: TrainerConfig) -> int:
    return config.packing.max_row_tokens * config.packing.rows_per_microbatch
