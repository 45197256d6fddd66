"""What every app's command line does: options, errors, exit codes. Imports no torch."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

from pydantic import BaseModel

from forge_trainer.config.load import load_config, print_help
from forge_trainer.errors import ConfigError, ForgeTrainerError

C = TypeVar("C", bound=BaseModel)
T = TypeVar("T")

OK, FAILED, BAD_CONFIG, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


class Terminated(BaseException):
    """SIGTERM, as KeyboardInterrupt is SIGINT."""


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
        with _raising_terminated():
            config = load_config(schema, own.config, overrides)
            code = dry_run(config) if dry_run and own.dry_run else start(config)
    except ConfigError as error:
        return _failed(error, BAD_CONFIG)
    except ForgeTrainerError as error:
        return _failed(error, FAILED)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except Terminated:
        print("terminated", file=sys.stderr)
        return TERMINATED
    return OK if code is None else code


def run(main: Coroutine[Any, Any, T]) -> T:
    """What `main` returns. SIGTERM cancels it as Ctrl-C does, so that it closes what it opened.

    Also where Ctrl-C is ignored, as in what a shell runs in the background.

    Raises:
        Terminated: `main` has closed.
    """
    is_told = False

    async def listening() -> T:
        task = asyncio.current_task()
        assert task is not None

        def end() -> None:
            nonlocal is_told
            # Schedulers may say it again while it closes, which is to be let to its end.
            if not is_told:
                is_told = True
                task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
        return await main

    before = signal.getsignal(signal.SIGTERM)
    try:
        return asyncio.run(listening())
    except (asyncio.CancelledError, ForgeTrainerError) as error:
        # Processes that got the signal as well are lost, which is not what ended the run.
        if is_told:
            raise Terminated from error
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if is_told else before)


@contextlib.contextmanager
def _raising_terminated() -> Iterator[None]:
    """SIGTERM raises Terminated, once, wherever this thread is; it closes what it opened."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _failed(error: Exception, code: int) -> int:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return code
