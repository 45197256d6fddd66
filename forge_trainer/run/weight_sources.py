"""Who can have weights: a generator, a published version, a checkpoint. See `compare`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forge_trainer.config import TrainerConfig
from forge_trainer.engine import find_engine
from forge_trainer.engine.checkpoint.files import MARKER, read_marker, verify_files
from forge_trainer.errors import CheckpointError, ConfigError, WeightsError
from forge_trainer.functional.pieces.manifests import describe_tensor, tensors_of
from forge_trainer.hf import load_causal_lm, unique_tensors
from forge_trainer.pieces import TensorFacts
from forge_trainer.protocols import Generator, WeightsReading
from forge_trainer.types import CheckpointFormat, World

HeldTensors = Mapping[str, tuple[Tensor, tuple[str, ...]]]
"""Tensors on the CPU by name, each with its further names."""


class GeneratorWeights:
    """What a generator runs on."""

    def __init__(self, generator: Generator, label: str = "generator") -> None:
        self._generator = generator
        self.label = label

    async def checksums(self) -> Mapping[str, TensorFacts]:
        return (await self._generator.weight_checksums()).tensors

    async def read(self, name: str) -> Tensor:
        return await self._generator.read_weight(name)


class PublishedWeights:
    """A version that is held while it is compared."""

    label = "published"

    def __init__(self, reading: WeightsReading) -> None:
        self._reading = reading

    async def checksums(self) -> Mapping[str, TensorFacts]:
        found = {}
        for name, entry in tensors_of(self._reading.manifest).items():
            tensor = await self._reading.read(name)
            tied = entry.pieces[0].record.tied
            found[name] = await asyncio.to_thread(describe_tensor, tensor, tied)
        return found

    async def read(self, name: str) -> Tensor:
        return await self._reading.read(name)


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Weights in this process."""

    label: str
    tensors: HeldTensors

    async def checksums(self) -> Mapping[str, TensorFacts]:
        return await asyncio.to_thread(
            lambda: {name: describe_tensor(*held) for name, held in self.tensors.items()}
        )

    async def read(self, name: str) -> Tensor:
        for first, (tensor, tied) in self.tensors.items():
            if name in (first, *tied):
                return tensor
        raise WeightsError(f"{self.label}: there is no tensor {name!r}")


def checkpoint_format(path: Path) -> CheckpointFormat:
    """What lies at `path`: a checkpoint of a trainer, or a Hugging Face directory.

    Raises:
        ConfigError: neither, or a checkpoint that is not complete.
    """
    if not (path / MARKER).exists() and (path / "config.json").is_file():
        return "hf"
    try:
        return read_marker(path).format
    except CheckpointError as error:
        raise ConfigError(f"--checkpoint: {error}") from error


async def read_checkpoint(
    path: Path, *, model_dir: Path, trainer: TrainerConfig, dtype: torch.dtype
) -> HeldTensors:
    """The weights at `path` as a trainer publishes them in `dtype`, read without that trainer.

    A Hugging Face directory is read by transformers. A checkpoint is read by an engine of the
    trainer's kind, of one rank in this process, whatever the layout of those who wrote it; the
    float32 model and its copy in `dtype` then exist at one time.

    Raises:
        CheckpointError: damaged, or of another model than that in `model_dir`.
    """
    if checkpoint_format(path) == "hf":
        return await asyncio.to_thread(_read_directory, path, dtype)
    alone = TrainerConfig(engine=trainer.engine, trainable=False, device="cpu")
    return await asyncio.to_thread(_read_through_engine, path, model_dir, alone, dtype)


def _read_directory(path: Path, dtype: torch.dtype) -> HeldTensors:
    if (path / MARKER).exists():
        marker = read_marker(path)
        verify_files(path, marker, sorted(marker.xxh3_128))
    return unique_tensors(load_causal_lm(path, dtype=dtype, device=torch.device("cpu")))


def _read_through_engine(
    path: Path, model_dir: Path, config: TrainerConfig, dtype: torch.dtype
) -> HeldTensors:
    engine = find_engine(config.engine)(config, model_dir, World())
    engine.setup()
    try:
        engine.load(str(path), weights_only=True)
        return {
            piece.name: (piece.data.to("cpu", piece.dtype, copy=True), piece.tied)
            for piece in engine.weight_pieces(dtype=dtype)
        }
    finally:
        engine.close()
