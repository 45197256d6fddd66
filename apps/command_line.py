"""What every app's command line does: options, errors, exit codes. Imports no torch."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel

from forge_trainer.config.load import load_config, print_help
from forge_trainer.errors import ConfigError, ForgeTrainerError

C = TypeVar("C", bound=BaseModel)

OK, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130


def run_app(
    module: str,
    schema: type[C],
    arguments: Sequence[str],
    start: Callable[[C], int | None],
    *,
    usage: str | None = None,
    about: str = "",
    dry_run: Callable[[C], int] | None = None,
) -> int:
    """Load the config, call `start` with it, and say how it ended; the exit code.

    `start` may return an exit code of its own. `about` follows the usage in --help. `dry_run` is
    called instead of it where --dry-run is given.
    """
    flags = "[--overwrite] [--dry-run]" if dry_run else "[--overwrite]"
    usage = usage or f"python -m {module} --config FILE {flags} [--section.key VALUE ...]"
    parser = argparse.ArgumentParser(prog=module, usage=usage, add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--overwrite", action="store_true")
    if dry_run is not None:
        parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    own, overrides = parser.parse_known_args(arguments)
    if own.help:
        print_help(schema, module, f"{usage}\n\n{about}" if about else usage)
        return OK
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        if own.config is None:
            raise ConfigError(f"--config is missing; usage: {usage}")
        if own.overwrite:
            overrides += ["--run.overwrite", "true"]
        config = load_config(schema, own.config, overrides)
        code = dry_run(config) if dry_run and own.dry_run else start(config)
    except ConfigError as error:
        return _failed(error, BAD_CONFIG)
    except ForgeTrainerError as error:
        return _failed(error, FAILED)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    return OK if code is None else code


def _failed(error: Exception, code: int) -> int:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return code
