"""How apps end on signals."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from apps.command_line import TERMINATED, Terminated, run, run_app
from forge_trainer.config import TinyModelConfig
from forge_trainer.errors import WorkerLostError


def test_sigterm_lets_a_run_close_what_it_opened() -> None:
    """However often it comes; who closes is not disturbed."""
    done: list[str] = []

    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            done.append("closed")

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Terminated):
            run(main())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert done == ["closed"]


def test_workers_that_sigterm_ended_are_no_cause() -> None:
    """A service manager sends it to all processes of a run at once."""

    async def main() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise WorkerLostError("a trainer process is gone") from None

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(Terminated):
            run(main())
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_error_without_sigterm_stays_what_it_is() -> None:
    async def main() -> None:
        raise WorkerLostError("a trainer process is gone")

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(WorkerLostError):
        run(main())
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_before_anything_runs_closes_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("num_layers: 1\n")
    done: list[str] = []

    def start(config: TinyModelConfig) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            done.append("closed")

    before = signal.getsignal(signal.SIGTERM)
    assert run_app("module", TinyModelConfig, ["--config", str(config)], start) == TERMINATED
    assert (done, capsys.readouterr().err) == (["closed"], "terminated\n")
    assert signal.getsignal(signal.SIGTERM) is before
