"""A directory's weights: as files, as tensors, as a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from forge_trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def load_causal_lm(
    path: str | Path, *, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The directory's model in `dtype` on `device`, in evaluation mode."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
    model.to(device)  # type: ignore[arg-type]
    model.eval()
    return model


def unique_tensors(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
    """Parameters and saved buffers by first name, each with further names of the same tensor."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return {names[0]: (tensor, tuple(names[1:])) for tensor, names in found.values()}


def count_parameters(path: Path) -> int:
    """Numbers in the directory's safetensors files, those of the index where there is one."""
    from safetensors import safe_open

    index = path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"].values() if index.is_file() else ()
    files = {path / name for name in listed} or set(path.glob("*.safetensors"))
    total = 0
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return total


def require_whole_weights(path: Path) -> None:
    """Every safetensors file of the directory can be read, and the index's tensors are there.

    Raises:
        ConfigError: names the file, or the tensors that are missing.
    """
    from safetensors import safe_open

    found: set[str] = set()
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path: {path} has no *.safetensors file to load weights from")
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as opened:
                found |= set(opened.keys())
        except Exception as error:
            raise ConfigError(
                f"model.path: {file} is no whole safetensors file ({error}); fetch it again"
            ) from error
    index = path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
    if missing := sorted(listed.keys() - found):
        raise ConfigError(
            f"model.path: {path} lacks {len(missing)} tensors of its index, such as {missing[:3]}; "
            "the download is incomplete, fetch it again"
        )


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the directory's safetensors files, memory-mapped.

    Raises:
        ConfigError: no safetensors file.
    """
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{path} has no *.safetensors file to load weights from")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
