"""The folder of a run: refused when it holds another run, emptied only when asked."""

from __future__ import annotations

import shutil
from pathlib import Path

from forge_trainer.config import GrpoConfig, RunConfig
from forge_trainer.errors import ConfigError

CONFIG_FILE = "run_config.yaml"
"""The resolved config; its presence says that a folder holds a run."""
FACTS_FILE = "trainer.json"
"""What the trainer says of itself: model, layout, devices, processes, library versions."""
METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
CHECKPOINTS_FOLDER = "checkpoints"
MODEL_FOLDER = "model"
"""A model made on the fly."""
FINAL_FOLDER = "final"
"""The trained model, as a Hugging Face directory."""
LOGS_FOLDER = "logs"
"""A file per process."""
CONTENTS = (
    FACTS_FILE,
    METRICS_FILE,
    EVALUATIONS_FILE,
    ROLLOUTS_FILE,
    TENSORBOARD_FOLDER,
    CHECKPOINTS_FOLDER,
    MODEL_FOLDER,
    FINAL_FOLDER,
    LOGS_FOLDER,
    CONFIG_FILE,
)
"""All that a run writes, and all that --overwrite deletes."""


def refuse_places_of_the_run(config: GrpoConfig) -> None:
    """Raises ConfigError if a folder of the user's is one that the run itself writes."""
    own = {name: Path(config.run.folder).resolve() / name for name in CONTENTS}
    given = {
        "trainer.checkpoint_folder": config.trainer.checkpoint_folder,
        "trainer.profiling.folder": config.trainer.profiling.folder,
    }
    for key, folder in given.items():
        for name, place in own.items() if folder is not None else ():
            if name != CHECKPOINTS_FOLDER and Path(str(folder)).resolve().is_relative_to(place):
                raise ConfigError(
                    f"{key}: {folder} is where the run writes its {name}; choose another folder, "
                    "or leave the key out"
                )


def prepare_run_folder(run: RunConfig, *, keep: Path) -> Path:
    """A writable folder without an earlier run. What lies at `keep` is not deleted for it.

    Raises:
        ConfigError: it holds a run and overwrite is off, holds something else, or cannot be
            written.
    """
    folder = Path(run.folder)
    try:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"run.folder: {folder} is a file")
        if folder.exists() and any(folder.iterdir()):
            _require_replaceable(folder, run.overwrite)
            if keep.resolve().is_relative_to(folder.resolve()):
                raise ConfigError(
                    f"run.folder: {folder} holds {keep}, the model of this run, and would be "
                    "emptied; choose another folder"
                )
            _delete_run(folder)
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"run.folder: cannot write to {folder}: {error.strerror}") from error
    return folder


def _require_replaceable(folder: Path, overwrite: bool) -> None:
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"run.folder: {folder} is not empty and holds no run ({CONFIG_FILE} is missing); "
            "nothing was touched, choose another folder"
        )
    if not overwrite:
        raise ConfigError(
            f"run.folder: {folder} holds an earlier run; give --overwrite to replace it, or "
            "another --run.folder"
        )


def _delete_run(folder: Path) -> None:
    for name in CONTENTS:
        entry = folder / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
