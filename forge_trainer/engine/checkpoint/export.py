"""A Hugging Face directory from a model in training: safetensors, index, config, tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from forge_trainer.errors import CheckpointError

from .files import MARKER
from .together import RankGroup

MAX_FILE_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"
COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")
"""Of the files beside the weights: config, tokenizer, chat template."""


class HfWriter:
    """Writes a part of the model's tensors into as few files as their size allows.

    The ranks that share a part gather its tensors together, and one of them writes. On NCCL the
    others could gather all at once, and their collectives would then wait, with the clock running,
    for a rank that is busy with its disk. So all ranks meet after every file, outside of NCCL, and
    nobody is further ahead than one file and one tensor.

    A failure is kept until `finish`, since the other ranks go on gathering tensors meanwhile.
    """

    def __init__(self, folder: Path, *, part: str, group: RankGroup, writes: bool = True) -> None:
        self._folder = folder
        self._group = group
        self._part = part
        self._writes = writes
        self._waiting: dict[str, Tensor] = {}
        self._num_files = 0
        self._file_of: dict[str, str] = {}
        self._num_bytes = 0
        self._error: str | None = None

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take whole tensors under their Hugging Face names, one at a time.

        A collective of all ranks, each with the tensors of its part, the same on those that share
        it. Parts may need different numbers of files.
        """
        size = 0
        for name, tensor in tensors:
            num_bytes = tensor.numel() * torch.float32.itemsize
            if size and size + num_bytes > MAX_FILE_BYTES:
                self._flush()
                self._meet(is_done=False)
                size = 0
            size += num_bytes
            self._keep(name, tensor)
        self._flush()
        while not self._meet(is_done=True):
            pass

    def _meet(self, *, is_done: bool) -> bool:
        """Wait for all ranks; True if all of them are done."""
        return all(self._group.on_each(lambda: is_done))

    def _keep(self, name: str, tensor: Tensor) -> None:
        if not self._writes or self._error is not None:
            return
        try:
            self._waiting[name] = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        except Exception as error:
            self._error = f"{name}: {error}"

    def _flush(self) -> None:
        if not self._waiting or self._error is not None:
            self._waiting = {}
            return
        self._num_files += 1
        file = f"model-{self._part}-{self._num_files:05d}.safetensors"
        try:
            save_file(self._waiting, self._folder / file, metadata={"format": "pt"})
        except Exception as error:
            self._error = f"{file}: {error}"
        self._file_of |= dict.fromkeys(self._waiting, file)
        self._num_bytes += sum(t.nbytes for t in self._waiting.values())
        self._waiting = {}

    def finish(self, model_dir: Path) -> set[str]:
        """Agree with the other ranks; rank 0 writes the index and what lies in `model_dir`.

        Returns the files of tensors that this rank wrote.

        Raises:
            CheckpointError: a rank could not write. On all ranks alike.
        """
        parts = self._group.on_each(self._written)
        index = {
            "metadata": {"total_size": sum(size for _, size in parts)},
            "weight_map": {name: file for own, _ in parts for name, file in own.items()},
        }

        def complete() -> None:
            (self._folder / INDEX).write_text(json.dumps(index, indent=1))
            _copy_model_files(model_dir, self._folder)

        self._group.on_first(complete)
        return set(self._file_of.values())

    def _written(self) -> tuple[dict[str, str], int]:
        if self._error is not None:
            raise CheckpointError(f"cannot write {self._folder}: {self._error}")
        return self._file_of, self._num_bytes


def _copy_model_files(model_dir: Path, folder: Path) -> None:
    """Everything but weights from the directory that training began with; dtype is float32 now."""
    for file in model_dir.iterdir():
        if file.name == MARKER or file.name.endswith(".index.json"):
            # Of the export that training began with.
            continue
        if file.suffix in COPIED_SUFFIXES:
            shutil.copy(file, folder / file.name)
    config = json.loads((model_dir / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2))
