"""Everything that can be known to fail before a process starts, as one ConfigError."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from forge_trainer.config import (
    AlgorithmConfig,
    GeneratorConfig,
    TrainerConfig,
    WeightsConfig,
)
from forge_trainer.data.fitting import CountTokens, PromptLimit, require_some_fit
from forge_trainer.data.prompts import Task
from forge_trainer.engine import ENGINES, find_engine
from forge_trainer.engine.profiling import require_memory_snapshots
from forge_trainer.engine.titan.support import refuse_unsupported, require_float8
from forge_trainer.errors import ConfigError, DataError
from forge_trainer.functional.losses.fields import check_old_logprobs
from forge_trainer.functional.losses.objective import make_loss
from forge_trainer.generation.vllm.support import check_vllm
from forge_trainer.hf import (
    ModelFacts,
    largest_token_id,
    read_hf_config,
    read_model_facts,
    require_full_attention,
    require_special_tokens,
    require_whole_weights,
    resolve_device,
    token_counter,
)
from forge_trainer.types import Gpu

PROMPTS_LOOKED_AT = 256


def check_models(
    path: Path,
    trainers: Iterable[TrainerConfig],
    generator: GeneratorConfig,
    weights: WeightsConfig,
    *,
    gpus: Sequence[Gpu] | None = None,
) -> None:
    """Trainer, reference and generator must fit the model and each other.

    `gpus` are those of the hosts; None asks torch for those of this process.

    Raises:
        ConfigError: with the key, what was given and what is allowed.
    """
    for trainer in trainers:
        check_trainer(path, trainer, gpus=gpus)
        if trainer.checkpoint_folder is not None:
            require_writable("trainer.checkpoint_folder", trainer.checkpoint_folder)
        if trainer.profiling.folder is not None:
            require_writable("trainer.profiling.folder", trainer.profiling.folder)
    if weights.shared_memory_folder is not None:
        # Asked for by name, so not passed over under `transport: auto`.
        require_writable("weights.shared_memory_folder", weights.shared_memory_folder, make=False)
    check_generator(path, generator, gpus=gpus)
    check_dtypes(weights, generator)


def check_trainer(
    path: Path, trainer: TrainerConfig, *, gpus: Sequence[Gpu] | None = None
) -> ModelFacts:
    """The model's facts, once the trainer is known to be able to train it; `gpus` as above.

    Raises:
        ConfigError: with the key, what was given and what is allowed.
    """
    device = resolve_device(trainer.device, None if gpus is None else len(gpus)).type
    require_memory_snapshots(trainer.profiling, device)
    require_float8(trainer.float8, device, _capability(device, gpus))
    if trainer.engine not in ENGINES:
        find_engine(trainer.engine)
    if trainer.engine == "titan":
        refuse_unsupported(read_hf_config(path))
    facts = read_model_facts(path)
    check_trainer_fits_model(trainer, facts)
    require_whole_weights(path)
    return facts


def _capability(device: str, gpus: Sequence[Gpu] | None) -> tuple[int, int] | None:
    """Of the device; None if that is not known from here."""
    if gpus is None and device == "cuda":
        return torch.cuda.get_device_capability()
    return gpus[0].capability if gpus else None


def check_generator(
    path: Path, generator: GeneratorConfig, *, gpus: Sequence[Gpu] | None = None
) -> None:
    """The generator and the tokenizer must fit the model; `gpus` as above.

    Raises:
        ConfigError: with the key, what was given and what is allowed.
    """
    device = resolve_device(generator.device, None if gpus is None else len(gpus)).type
    facts = read_model_facts(path)
    if generator.backend == "vllm":
        check_vllm(generator, facts, device)
    else:
        require_full_attention(path)
    check_generator_fits_model(generator, facts)
    check_tokenizer_fits_model(path, facts)


def check_prompts(
    task: Task, path: Path, generator: GeneratorConfig, *, count: CountTokens | None = None
) -> Task:
    """The task, of whose prompts only those that the generator takes are given.

    `count` knows how a prompt becomes tokens; None counts its text. The first prompts are looked
    at, and said to be too long where they are.

    Raises:
        ConfigError: one of them is malformed, none fits, or one does not where all must.
    """
    count = count or _count_text(path)
    limit = PromptLimit(generator.max_prompt_tokens, count, task.prompts.on_long_prompt)
    try:
        first = task.prompts.peek(PROMPTS_LOOKED_AT)
    except DataError as error:
        raise ConfigError(f"task: {error}") from error
    require_some_fit(first, limit)
    return replace(task, prompts=task.prompts.with_limit(limit))


def _count_text(path: Path) -> CountTokens:
    count = token_counter(path)
    return lambda prompt: count("\n".join(m.content for m in prompt.messages) or prompt.text)


def check_dtypes(weights: WeightsConfig, generator: GeneratorConfig) -> None:
    """A generator loads weights in place, so it must run in what they are published in.

    Raises:
        ConfigError: it does not.
    """
    if generator.dtype not in (None, weights.dtype):
        raise ConfigError(
            f"generator.dtype: {generator.dtype}, but weights.dtype is {weights.dtype}, and "
            "weights are loaded as they are published; make them equal or leave the first out"
        )


def require_writable(key: str, folder: str, *, make: bool = True) -> None:
    """A folder that can be written, and, if `make`, one that can be made.

    Raises:
        ConfigError: neither. Nothing is left behind.
    """
    path = Path(folder)
    missing = [part for part in (path, *path.parents) if not part.exists()]
    if missing and not make:
        raise ConfigError(f"{key}: {folder} does not exist; make it, or leave the key out")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(f"{key}: cannot write to {folder}: {error.strerror}") from error
    finally:
        for part in missing:
            with contextlib.suppress(OSError):
                part.rmdir()


def check_port(trainer: TrainerConfig) -> None:
    """The configured port can be had on this host.

    Raises:
        ConfigError: it cannot.
    """
    port = trainer.master_port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port or 0))
        except OSError as error:
            raise ConfigError(
                f"trainer.master_port: {port} cannot be had on this host ({error.strerror}); leave "
                "it out to get a free one"
            ) from error


def check_checkpoint_folder(trainer: TrainerConfig) -> None:
    """A folder of checkpoints outside the run folder can be made, and holds no other run's.

    Raises:
        ConfigError: saving would fail in mid-run.
    """
    folder = trainer.checkpoint_folder
    if folder is None:
        return
    require_writable("trainer.checkpoint_folder", folder)
    if any(Path(folder).glob("step-*")):
        raise ConfigError(
            f"trainer.checkpoint_folder: {folder} holds checkpoints already; choose another folder"
        )


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """The loss must know its options, and get all it needs from rollouts.

    Raises:
        ConfigError: with the key, what was given and what is allowed.
    """
    loss, options = algorithm.loss, algorithm.loss_options
    try:
        make_loss(loss, options)
        check_old_logprobs(
            loss,
            options,
            are_given=algorithm.recompute_logprobs,
            updates_per_batch=algorithm.updates_per_batch,
        )
    except ConfigError as error:
        raise ConfigError(f"algorithm.loss_options: {error}") from error


def check_trainer_fits_model(trainer: TrainerConfig, facts: ModelFacts) -> None:
    """Relations between the trainer's config and the model's.

    Raises:
        ConfigError: with the key, what was given and what is allowed.
    """
    tensor = trainer.parallel.tensor
    for name, heads in (("attention", facts.num_heads), ("key-value", facts.num_kv_heads)):
        if heads % tensor:
            raise ConfigError(
                f"trainer.parallel.tensor: {tensor} does not divide the model's {heads} "
                f"{name} heads"
            )
    stages = trainer.parallel.pipeline
    if stages > facts.num_layers:
        raise ConfigError(
            f"trainer.parallel.pipeline: {stages} stages for the model's {facts.num_layers} layers"
        )
    if stages > 1 and facts.tie_embeddings:
        raise ConfigError(
            f"trainer.parallel.pipeline: {stages}, but the model ties its embeddings "
            "(tie_word_embeddings), which would lie on two stages; TorchTitan cannot do that"
        )
    longest = trainer.max_sequence_tokens
    if longest is not None and longest > facts.max_sequence_tokens:
        raise ConfigError(
            f"trainer.max_sequence_tokens: {longest} exceeds the model's "
            f"max_position_embeddings={facts.max_sequence_tokens}"
        )


def check_generator_fits_model(generator: GeneratorConfig, facts: ModelFacts) -> None:
    """A prompt and its completion must fit into the model.

    Raises:
        ConfigError: with the keys, what was given and what is allowed.
    """
    wanted = generator.max_prompt_tokens + generator.max_completion_tokens
    if wanted > facts.max_sequence_tokens:
        raise ConfigError(
            f"generator.max_prompt_tokens + generator.max_completion_tokens: {wanted} exceed the "
            f"model's max_position_embeddings={facts.max_sequence_tokens}"
        )


def check_tokenizer_fits_model(path: Path, facts: ModelFacts) -> None:
    """Every token of the tokenizer must have an embedding.

    Raises:
        ConfigError: the tokenizer is missing or has more tokens than the model.
    """
    largest = largest_token_id(path)
    if largest >= facts.vocab_size:
        raise ConfigError(
            f"model.path: the tokenizer of {path} has token ids up to {largest}, the model has "
            f"embeddings for vocab_size={facts.vocab_size}; they do not belong together"
        )
    require_special_tokens(path)
