"""What lies in a checkpoint of DCP's: weights in one folder, the rest of the state in another.

Each holds a file per rank and DCP's own metadata, so whoever needs weights alone reads and verifies
nothing else, and each folder is a checkpoint that DCP reads by itself.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from forge_trainer.errors import CheckpointError

from .staging import State
from .together import RankGroup

WEIGHTS, REST = "weights", "state"
MODEL = "model"
"""Key of the weights in a state, and before their names in DCP's metadata."""


def save_parts(state: State, folder: Path, group: RankGroup) -> set[str]:
    """Write the state; the files that this rank wrote, relative to the folder."""
    written = set()
    for part, values in _divided(state):
        _through_dcp(dcp.save, values, folder / part, group)
        own = (folder / part).glob(f"__{group.rank}_*")
        written |= {f"{part}/{file.name}" for file in own}
    return written


def load_parts(state: State, folder: Path, group: RankGroup) -> None:
    """Fill the state: its tensors in place, other values in the dict."""
    for part, values in _divided(state):
        _through_dcp(dcp.load, values, folder / part, group)
        state.update(values)


def _divided(state: State) -> Iterator[tuple[str, State]]:
    rest = {key: value for key, value in state.items() if key != MODEL}
    yield WEIGHTS, {MODEL: state[MODEL]}
    if rest:
        yield REST, rest


def _through_dcp(
    function: Callable[..., object], state: State, path: Path, group: RankGroup
) -> None:
    """Save or load on the ranks of the group."""
    if group.process_group is not None:
        function(state, checkpoint_id=path, process_group=group.process_group)
        return
    # Filters belong to the process, so they are touched only where DCP warns: alone.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        function(state, checkpoint_id=path, no_dist=True)


def needed_files(names: Iterable[str], *, weights_only: bool) -> list[str]:
    """The files that a load reads."""
    return sorted(name for name in names if not weights_only or name.startswith(f"{WEIGHTS}/"))


def is_read_by(name: str, group: RankGroup) -> bool:
    """True for one rank of the group: that which wrote the file, if the layout is the same."""
    written_by = re.search(r"/__(\d+)_", name)
    return (int(written_by[1]) if written_by else 0) % group.size == group.rank


def require_same_model(path: Path, state: State, group: RankGroup) -> None:
    """Raises CheckpointError unless all ranks together have the tensors of the checkpoint."""
    own = {f"{MODEL}.{name}": tuple(value.shape) for name, value in state[MODEL].items()}
    wanted = {name: shape for part in group.on_each(lambda: own) for name, shape in part.items()}
    metadata: Any = group.on_first(lambda: dcp.FileSystemReader(path / WEIGHTS).read_metadata())
    found = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    differences = sorted(dict(found.items() ^ wanted.items()))
    if differences:
        name = differences[0]
        raise CheckpointError(
            f"checkpoint {path} is of another model: {len(differences)} tensors differ, first "
            f"{name.removeprefix(f'{MODEL}.')}: {found.get(name, 'absent')} there, "
            f"{wanted.get(name, 'absent')} here"
        )
