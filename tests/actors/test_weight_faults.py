"""Weights when processes die, memory runs out, and everyone reads at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_trainer.config import WeightsConfig
from forge_trainer.controller.ranks import TrainerSetup
from forge_trainer.controller.trainer import TrainerHandle
from forge_trainer.errors import WeightsError, WorkerLostError
from forge_trainer.pieces import StoreAddress, WeightPiece, WeightsVersion
from forge_trainer.processes.handles import MeshRanks
from forge_trainer.processes.lifecycle import _spawn_ranks
from forge_trainer.processes.meshes import (
    join_ranks,
    prepare_controller,
    running_mesh,
    start_store,
    stop_store,
)
from forge_trainer.processes.store import RunStore
from forge_trainer.protocols import WeightStore
from forge_trainer.weights.shared_memory.folder import shared_folder
from forge_trainer.weights.stores import open_store
from forge_trainer.weights.torchstore.leases import LeaseWatch
from tests.actors.conftest import TRAINER, running_cluster
from tests.actors.readers import SHAPES, Reader
from tests.data import random_sequences
from tests.processes import descendants, shared_memory, wait_until_gone
from tests.waiting import A_HANG_S, until
from tests.weights import V0, publish, read_all

GOOD = random_sequences(6)
ROUNDS, READERS = 200, 3
WEIGHTS = WeightsConfig(verify="off", lease_timeout_s=1.0)


@contextlib.asynccontextmanager
async def _place(transport: str) -> AsyncIterator[StoreAddress]:
    if transport == "shared_memory":
        with shared_folder() as folder:
            yield StoreAddress(transport, str(folder))
        return
    async with running_mesh("store", num_processes=1, cpu_threads=1) as mesh:
        await start_store(mesh, f"faults_{os.getpid()}")
        yield StoreAddress(transport, f"faults_{os.getpid()}")
        await stop_store(f"faults_{os.getpid()}")


@contextlib.asynccontextmanager
async def _readers(transport: str) -> AsyncIterator[tuple[WeightStore, list[Any]]]:
    """A store in this process, and readers in others."""
    prepare_controller()
    async with _place(transport) as address:
        meshes = [
            running_mesh(f"reader{i}", num_processes=1, cpu_threads=1) for i in range(READERS)
        ]
        async with contextlib.AsyncExitStack() as stack:
            started = [await stack.enter_async_context(mesh) for mesh in meshes]
            store = open_store(address, WEIGHTS)
            readers = [
                mesh.spawn("reader", Reader, address, WEIGHTS, seed)
                for seed, mesh in enumerate(started)
            ]
            yield store, readers
            store.close()


@pytest.fixture(scope="module", params=["shared_memory", "torchstore"])
def running(request: pytest.FixtureRequest) -> Iterator[tuple[Any, WeightStore, list[Any]]]:
    before, segments = descendants(), shared_memory()
    with asyncio.Runner() as runner:
        readers = _readers(request.param)
        store, actors = runner.run(readers.__aenter__())
        yield runner.run, store, actors
        runner.run(readers.__aexit__(None, None, None))
    assert not wait_until_gone(descendants() - before)
    assert shared_memory() <= segments


def _filled(value: float) -> list[list[WeightPiece]]:
    """Two ranks' halves of all tensors."""
    return [
        [
            WeightPiece(name, shape, (8 * rank, 0), torch.full((8, shape[1]), value), torch.float32)
            for name, shape in SHAPES.items()
        ]
        for rank in range(2)
    ]


async def _all_have_read(readers: list[Any], *, at_least: int) -> None:
    async with asyncio.timeout(A_HANG_S):
        for reader in readers:
            while await reader.num_versions.call_one() < at_least:
                await asyncio.sleep(0.001)


def test_readers_at_once_see_whole_versions_in_order(
    running: tuple[Callable[[Coroutine[Any, Any, Any]], Any], WeightStore, list[Any]],
) -> None:
    run, store, readers = running

    async def scenario() -> list[list[WeightsVersion]]:
        last = WeightsVersion(0, ROUNDS - 1)
        delays = random.Random(0)
        await asyncio.gather(*(one.is_ready.call_one() for one in readers))
        following = [asyncio.ensure_future(one.follow.call_one(last)) for one in readers]
        leaving: list[WeightsVersion] = []
        for step in range(ROUNDS):
            await asyncio.sleep(delays.uniform(0, 0.01))
            await publish(store, WeightsVersion(0, step), _filled(float(step)))
            leaving += (await store.versions())[:-2]
            leaving = [v for v in dict.fromkeys(leaving) if not await store.drop(v)]
            if step % 15 == 0:
                # They read beside the publisher, not after it.
                await _all_have_read(readers, at_least=step // 15 + 1)
        seen: list[list[WeightsVersion]] = await asyncio.gather(*following)
        async with asyncio.timeout(A_HANG_S):
            while leaving:
                leaving = [v for v in leaving if not await store.drop(v)]
        assert await store.num_readers() == 0
        assert len(await store.versions()) == 2
        return seen

    for versions in run(scenario()):
        assert len(set(versions)) > 10


def test_a_reader_that_dies_holds_nothing_for_long(
    running: tuple[Callable[[Coroutine[Any, Any, Any]], Any], WeightStore, list[Any]],
) -> None:
    """Runs last in this file's use of the readers: one of them is killed."""
    run, store, readers = running
    old, new = WeightsVersion(5, 0), WeightsVersion(5, 1)

    async def scenario() -> None:
        await publish(store, old, _filled(1.0))
        pid = await readers[-1].hold.call_one(old)
        await publish(store, new, _filled(2.0))
        clock = _ClockOfLeases(store)
        # For as long as it lives, however long that is.
        for _ in range(4):
            assert await store.num_readers() == 1
            assert not await store.drop(old)
            await clock.advance(0.9 * WEIGHTS.lease_timeout_s)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(A_HANG_S):
            while not await store.drop(old):
                clock.now += WEIGHTS.lease_timeout_s / 4
                await asyncio.sleep(0.05)
        assert await store.num_readers() == 0
        assert (await read_all(store))[0] == new

    run(scenario())


class _ClockOfLeases:
    """The clock by which the store's owner judges readers; shared memory needs none."""

    def __init__(self, store: Any) -> None:
        self.now = 0.0
        self._store = store
        if self._store.transport == "torchstore":
            timeout_s = WEIGHTS.lease_timeout_s
            self._store._watch = LeaseWatch(timeout_s, clock=lambda: self.now)

    async def advance(self, seconds: float) -> None:
        """Let time go by, in which the reader has given a sign of life."""
        if self._store.transport != "torchstore":
            return
        before = await self._beats()
        async with asyncio.timeout(A_HANG_S):
            while await self._beats() <= before:
                await asyncio.sleep(0.01)
        assert await self._store.num_readers() == 1
        self.now += seconds

    async def _beats(self) -> int:
        keys = await (await self._store.client()).keys("leases")
        return max(int(key.rsplit(".", 1)[1]) for key in keys)


async def _restarted(ranks: MeshRanks, cluster: Any, folder: Path) -> TrainerHandle:
    """A new trainer over the store of the dead one."""
    setup = TrainerSetup(TRAINER, WeightsConfig(), cluster.model_dir, folder, cluster.store)
    handle = TrainerHandle(setup, ranks)
    await handle.setup()
    return handle


def test_a_trainer_killed_in_mid_push_leaves_the_last_version(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    model_dir = Path(shutil.copytree(tiny_qwen3, tmp_path / "model"))
    config = TRAINER.model_copy(update={"engine": "tests.engines:SlowToPublish"})
    weights = WeightsConfig()
    with running_cluster(model_dir, tmp_path, config, weights) as cluster:
        trainer, generator = cluster.trainer, cluster.generator
        first = cluster.run(trainer.push_weights())
        assert first.transport == "shared_memory"
        cluster.run(generator.pull_weights(first))
        cluster.run(trainer.train_step(GOOD, loss="grpo"))
        rank = cluster.run(trainer.get_config()).ranks[1]

        async def push_and_kill() -> None:
            (model_dir / "slow").touch()
            pushing = asyncio.create_task(trainer.push_weights())
            await until((model_dir / "reached").exists)
            os.kill(rank.pid, signal.SIGKILL)
            await pushing

        with pytest.raises(WorkerLostError, match="a trainer process is gone"):
            cluster.run(push_and_kill())
        (model_dir / "slow").unlink()

        async def recover() -> None:
            assert await cluster.store.versions() == [first.version]
            # Still whole, and still what readers run.
            assert await generator.pull_weights() == first.version
            async with running_mesh("trainer", num_processes=2, cpu_threads=1) as mesh:
                await join_ranks(mesh, None)
                ranks = _spawn_ranks(mesh, TRAINER, weights, model_dir)
                await ranks.open_store(cluster.services.store.address)
                handle = await _restarted(ranks, cluster, tmp_path)
                await handle.train_step(GOOD, loss="grpo")
                ref = await handle.push_weights()
                assert ref.version == WeightsVersion(1, 1)
                assert await generator.pull_weights() == ref.version
                assert await cluster.store.versions() == [first.version, ref.version]
                await handle.close()

        cluster.run(recover())


def test_a_lost_store_is_named_and_a_new_one_gets_the_weights(
    tiny_qwen3: Path, tmp_path: Path
) -> None:
    config = TRAINER.model_copy(update={"num_ranks": 1})
    before = descendants()
    with running_cluster(
        tiny_qwen3, tmp_path, config, WeightsConfig(transport="torchstore")
    ) as cluster:
        trainer, generator = cluster.trainer, cluster.generator
        known = {rank.pid for rank in cluster.run(trainer.get_config()).ranks}
        known.add(cluster.run(generator.get_status()).pid)
        first = cluster.run(trainer.push_weights())
        cluster.run(generator.pull_weights(first))
        cluster.run(trainer.train_step(GOOD, loss="grpo"))
        stores = [
            pid
            for pid in descendants() - before - known
            if b"monarch" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        assert len(stores) == 1, stores
        os.kill(stores[0], signal.SIGKILL)
        with pytest.raises(WeightsError, match="weight store .* failed.*restart_store"):
            cluster.run(trainer.push_weights())
        with pytest.raises(WeightsError, match="weight store .* failed"):
            cluster.run(generator.pull_weights(first))
        assert cluster.run(generator.get_status()).version == first.version
        assert cluster.run(trainer.get_status()).step == 1
        ref = cluster.run(cluster.services.restart_store())
        assert ref.version == WeightsVersion(1, 1)
        assert cluster.run(generator.pull_weights(ref)) == ref.version
        cluster.run(trainer.train_step(GOOD, loss="grpo"))
        assert cluster.run(trainer.push_weights()).version == WeightsVersion(1, 2)


def test_auto_takes_torchstore_where_memory_is_not_shared(tmp_path: Path) -> None:
    opened: list[StoreAddress] = []

    class Far:
        async def can_reach(self, token: str) -> bool:
            assert Path(token).exists()
            return False

        async def open_store(self, address: StoreAddress) -> None:
            opened.append(address)

    async def scenario() -> None:
        prepare_controller()
        async with contextlib.AsyncExitStack() as stack:
            store = await RunStore(WeightsConfig(), stack).open([Far()])
            assert store.transport == "torchstore"
            await publish(store, V0, _filled(1.0))
            assert (await read_all(store))[0] == V0
        assert [address.transport for address in opened] == ["torchstore"]

    before = descendants()
    asyncio.run(scenario())
    assert not wait_until_gone(descendants() - before)


PUBLISHER = """
import asyncio, sys
from pathlib import Path
from forge_trainer.errors import WeightsError
from forge_trainer.weights.shared_memory.folder import shared_folder
from forge_trainer.weights.shared_memory.store import SharedMemoryWeightStore
from tests.waiting import A_HANG_S, until
from tests.weights import V0, V1, model, pieces_of, publish, read_all
import torch

root = Path(sys.argv[1])
with shared_folder(root) as folder:
    store = SharedMemoryWeightStore(folder)
    asyncio.run(publish(store, V0, [pieces_of(model())]))
"""


def _script(body: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """PUBLISHER, going on with `body` inside its folder."""
    code = PUBLISHER + textwrap.indent(textwrap.dedent(body), "    ")
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_killed_run_leaves_segments_that_the_next_one_cleans_and_only_those(
    tmp_path: Path,
) -> None:
    wait = "print(folder, flush=True); sys.stdin.readline()"
    foreign = tmp_path / f"forge_trainer-{os.getuid() + 1}-x"
    foreign.mkdir()
    killed, living = _script(wait, str(tmp_path)), _script(wait, str(tmp_path))
    try:
        left, kept = (Path(_first_line(one)) for one in (killed, living))
        assert left != kept
        killed.kill()
        killed.wait()
        assert any((left / "segments").iterdir())
        with shared_folder(tmp_path) as folder:
            assert {path.name for path in tmp_path.iterdir()} == {
                folder.name,
                kept.name,
                foreign.name,
            }
            # Two runs at once do not see each other's versions.
            own = open_store(StoreAddress("shared_memory", str(folder)), WEIGHTS)
            assert asyncio.run(own.versions()) == []
            other = open_store(StoreAddress("shared_memory", str(kept)), WEIGHTS)
            assert asyncio.run(other.versions()) == [V0]
            own.close()
            other.close()
        assert not folder.exists()
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()


def test_a_full_shared_memory_is_a_clear_error_and_the_old_version_stays(tmp_path: Path) -> None:
    """On a tmpfs of 1 MB in a namespace of its own."""
    probe = ["unshare", "-Urm", "sh", "-c", f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs user namespaces")
    body = """
    large = {"large": torch.ones(2**19)}
    try:
        asyncio.run(publish(store, V1, [pieces_of(large)]))
    except WeightsError as error:
        print(error)
    version, found = asyncio.run(read_all(store))
    assert (version, found.keys()) == (V0, model().keys())
    assert all(torch.equal(found[name], tensor) for name, tensor in model().items())
    asyncio.run(publish(store, V1, [pieces_of(model(1.0))]))
    print(asyncio.run(read_all(store))[0])
    """
    mount = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec "$@"'
    prefix = ("unshare", "-Urm", "sh", "-c", mount, "sh")
    out, err = _script(body, str(tmp_path), prefix=prefix).communicate(timeout=A_HANG_S)
    assert err == ""
    message, version = out.splitlines()
    assert message.startswith("no room for 2.0 MiB of weights in "), message
    assert "MiB are free" in message
    assert "weights.shared_memory_folder" in message
    assert version == "e0v1"


def test_two_hundred_versions_leave_memory_and_files_as_they_were() -> None:
    """Pushed, pulled and dropped, through shared memory."""
    tensors = {f"t{i}": torch.zeros(64, 1024) for i in range(8)}
    live = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def pieces() -> list[WeightPiece]:
        return [
            WeightPiece(name, tuple(tensor.shape), (0, 0), tensor, torch.float32)
            for name, tensor in tensors.items()
        ]

    def used() -> tuple[int, int, int]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files = len(list(Path("/proc/self/fd").iterdir()))
        segments = sum(path.stat().st_blocks for path in folder.rglob("*"))
        return pages * os.sysconf("SC_PAGE_SIZE"), files, segments

    async def scenario() -> None:
        writer, reader = (open_store(address, WeightsConfig()) for _ in range(2))
        settled = None
        for step in range(220):
            for tensor in tensors.values():
                tensor.fill_(float(step))
            await publish(writer, WeightsVersion(0, step), [pieces()])
            async with reader.reading() as reading:
                await reading.load_into(live)
            assert float(live["t7"][-1, -1]) == float(step)
            for old in (await writer.versions())[:-2]:
                assert await writer.drop(old)
            if step == 19:
                settled = used()
        assert settled is not None
        memory, files, segments = used()
        # A version has 2 MB; 200 of them would have 400. Garbage of other tests is some MB.
        assert memory - settled[0] < 20 * 2**20
        assert (files, segments) == settled[1:]
        writer.close()
        reader.close()

    with shared_folder() as folder:
        address = StoreAddress("shared_memory", str(folder))
        asyncio.run(scenario())
