"""Shared fixtures, and shape checks on the functional core."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jaxtyping
import pytest

jaxtyping.install_import_hook("forge_trainer.functional", "beartype.beartype")

from forge_trainer.config import TinyModelConfig  # noqa: E402  (after the hook)
from forge_trainer.hf import create_tiny_model  # noqa: E402
from forge_trainer.weights.shared_memory import folder  # noqa: E402
from tests.processes import SHARED_MEMORY  # noqa: E402

# A shell lets what it runs in the background ignore Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples take as long as they take: no clock decides. No database: suites share no files.
hypothesis.settings.register_profile("suite", deadline=None, database=None)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def own_shared_memory() -> Iterator[None]:
    """Weights of this suite's stores lie in a folder of its own, which is empty in the end."""
    SHARED_MEMORY.mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(folder, "default_root", lambda: SHARED_MEMORY)
        yield
    left = list(SHARED_MEMORY.iterdir())
    shutil.rmtree(SHARED_MEMORY)
    assert left == [], "shared memory is left"


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen 3 directory with tied embeddings and grouped key-value heads."""
    tiny = TinyModelConfig(
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_sequence_tokens=64,
    )
    return create_tiny_model(tmp_path_factory.mktemp("qwen3"), tiny, seed=0)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama directory without tied embeddings."""
    tiny = TinyModelConfig(
        architecture="llama",
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_sequence_tokens=64,
        tie_embeddings=False,
    )
    return create_tiny_model(tmp_path_factory.mktemp("llama"), tiny, seed=0)
