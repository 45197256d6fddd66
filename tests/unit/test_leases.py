"""Who holds a version: judged by the dropper's own clock, and by locks."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from forge_trainer.weights.keys import lease_key
from forge_trainer.weights.shared_memory import folder as shared_folder
from forge_trainer.weights.shared_memory.folder import LOCK, clean_orphans, hold
from forge_trainer.weights.shared_memory.folder import shared_folder as new_folder
from forge_trainer.weights.torchstore.leases import LeaseWatch
from tests.weights import V0, V1


class Keys:
    """As much of torchstore's client as leases need; slow enough for others to come between."""

    def __init__(self, *keys: str) -> None:
        self.held = set(keys)

    async def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.held if key.startswith(prefix))

    async def delete(self, key: str) -> None:
        await asyncio.sleep(0)
        self.held.remove(key)


def test_a_lease_without_a_sign_of_life_dies_by_the_clock_of_who_looks() -> None:
    async def scenario() -> None:
        now = 100.0
        client = Keys(lease_key(V0, "aa", 0), lease_key(V0, "bb", 7), lease_key(V1, "cc", 2))
        watch = LeaseWatch(timeout_s=10.0, clock=lambda: now)
        assert await watch.living(client) == 3
        now = 109.0
        client.held.add(lease_key(V0, "bb", 8))
        assert await watch.living(client, V0) == 2
        now = 111.0
        # Of V0 only the one that gave a sign; who reads V1 was seen no later than at first.
        assert await watch.living(client, V0) == 1
        assert await watch.living(client, V1) == 0
        assert await watch.living(client) == 1
        assert client.held == {lease_key(V0, "bb", 7), lease_key(V0, "bb", 8)}

    asyncio.run(scenario())


def test_two_looks_at_once_agree_that_a_reader_is_dead() -> None:
    async def scenario() -> None:
        now = 0.0
        client = Keys(lease_key(V0, "dead", 0))
        watch = LeaseWatch(timeout_s=1.0, clock=lambda: now)
        assert await watch.living(client) == 1
        now = 5.0
        assert not any(await asyncio.gather(watch.living(client, V0), watch.living(client)))
        assert not client.held

    asyncio.run(scenario())


def test_a_folder_in_the_making_is_nobodys_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock file may be there and not locked yet."""
    with new_folder(tmp_path) as folder:
        name = folder.name
    making = tmp_path / f".new-{name}"
    making.mkdir()
    assert clean_orphans(tmp_path) == []
    (making / LOCK).touch()
    assert clean_orphans(tmp_path) == []
    old = time.time() - shared_folder.UNLOCKED_AGE_S - 1
    os.utime(making, (old, old))
    lock = hold(making)
    assert clean_orphans(tmp_path) == []
    os.close(lock)
    assert clean_orphans(tmp_path) == [making]
    # A whole one needs no age.
    whole = tmp_path / name
    whole.mkdir()
    (whole / LOCK).touch()
    assert clean_orphans(tmp_path) == [whole]
    assert not list(tmp_path.iterdir())
